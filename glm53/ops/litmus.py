"""Kernels of the litmus loops: message passing, counter, copy. Addresses are device addresses as the launching device sees them, because
the memory may be registered host memory or a peer's. Protocol: hipsrc/kernels/litmus.hip.
"""

from __future__ import annotations

from glm53.hip import Array, Stream
from glm53.ops.args import copy_words_args, counter_args, litmus_args
from glm53.ops.contract import Cost, Dims, ceil_div, launch
from glm53.spec import DType

COPY_WORDS = 1024  # 16-byte words a block, as in the LAUNCH line of litmus.hip
WORD_MASK = (1 << 64) - 1


def word(round_number: int, index: int) -> int:
    """Data word `index` of round `round_number`, as litmus_word in litmus.hip: for a host that sends or checks."""
    value = (round_number * 0x9E3779B97F4A7C15 + index * 0xBF58476D1CE4E5B9) & WORD_MASK
    value ^= value >> 29
    value = value * 0x94D049BB133111EB & WORD_MASK
    return value ^ (value >> 32)


def _message(kernel: str, stream: Stream, mailbox: int, reply: int, result: Array, rounds: int, words: int, budget: int) -> None:
    dims = Dims(kernel)
    dims.match("result", result, 2, dtype=DType.U64)
    counts = f"rounds {rounds}, words {words}, budget {budget}: expected at least 1"
    dims.require(0 < rounds < 1 << 32 and 0 < words < 1 << 32 and budget > 0, counts)
    dims.require(mailbox % 8 == 0 and reply % 8 == 0, f"mailbox {mailbox:#x} and reply {reply:#x}: expected multiples of 8")
    launch(stream, kernel, (1, 1, 1), litmus_args(mailbox, reply, result.address, budget, rounds, words))


def send(stream: Stream, mailbox: int, reply: int, result: Array, rounds: int, words: int, budget: int) -> None:
    """Sends `rounds` messages: data words, then the sequence number; waits for each echo at most `budget` polls.

    mailbox: address of [1 + words] u64 (sequence, data), reply: of [1] u64, both zero at the start, uncached or coherent memory;
    result [2] u64: rounds echoed, 0. The receiver must have been enqueued, or be a host thread, before anything waits for this kernel.
    """
    _message("litmus_send", stream, mailbox, reply, result, rounds, words, budget)


def receive(stream: Stream, mailbox: int, reply: int, result: Array, rounds: int, words: int, budget: int) -> None:
    """The other side of `send`; result [2] u64, zero at the start: rounds received, first round with a wrong word (0: none)."""
    _message("litmus_receive", stream, mailbox, reply, result, rounds, words, budget)


def counter_step(stream: Stream, state: Array, step: Array, slot: int) -> None:
    """state[slot] = state[slot] * 6364136223846793005 + step[0] mod 2^64; state [slots] u64, step [1] u64. One node of the graph litmus."""
    dims = Dims("counter_step")
    dims.match("state", state, "slots", dtype=DType.U64)
    dims.match("step", step, 1, dtype=DType.U64)
    dims.require(0 <= slot < dims["slots"], f"slot is {slot}, expected one of slots={dims['slots']} (bound by state dim 0)")
    launch(stream, "counter_step", (1, 1, 1), counter_args(state.address, step.address, slot, 0))


def copy_words(stream: Stream, source: int, target: int, count: int) -> None:
    """Copies `count` 16-byte words between two addresses, each a multiple of 16: a kernel's own way to registered or peer memory."""
    dims = Dims("copy_words")
    dims.require(count > 0, f"count is {count}, expected at least 1")
    dims.require(source % 16 == 0 and target % 16 == 0, f"source {source:#x} and target {target:#x}: expected multiples of 16")
    launch(stream, "copy_words", (ceil_div(count, COPY_WORDS), 1, 1), copy_words_args(source, target, count))


def cost_copy_words(count: int) -> Cost:
    return Cost(32 * count, 0)
