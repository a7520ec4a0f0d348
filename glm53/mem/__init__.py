"""Memory bookkeeping: extents and histories. Pure: no device calls, no clock, no random source; addresses come in as numbers."""
