"""Which work runs next. Pure: takes the state of requests, returns actions; no device calls, no clock, no random source."""
