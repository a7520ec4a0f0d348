"""The selection of a pair of devices from the local lists of both sides, on each of them (docs/decisions/0006-pair.md). Kernels: merge.hip.

A list, from `selection.topk` or `Selector.topk` with a share: entries [rows, k] u64, order key of the score << 32 | ~position, ascending by position.
Both sides get the selection of a single device, bit for bit: the highest scores, ties to the lowest position, -0 equals +0, NaN counts as -inf.
"""

from __future__ import annotations

from dataclasses import dataclass

from glm53.hip import Array, Stream
from glm53.ops.contract import Cost, Dims, launch, require_index
from glm53.ops.pair_args import exchange_lists_args, merge_args
from glm53.ops.step import SumMail
from glm53.ops.step_args import select_both_args
from glm53.ops.step_select import Drawn, Selector
from glm53.spec import DType, Shard

SENT = 4096  # `sent` of the LAUNCH line in select_both.hip: entries of a row that a side sends there, at most


@dataclass(frozen=True)
class Lists:
    """One side's lists and where its selection goes.

    entries [rows, k] u64, counts [rows] i32 in; positions [rows] i32 of the query rows: where they are below k the selection is the identity.
    selected [rows, k] i32 out, positions ascending, -1 past selected_counts[r] = min(k, positions[r] + 1); selected_counts [rows] i32 out. drawn:
    selections given instead, for rows that are not the identity. k at most 2,048.
    """

    entries: Array
    counts: Array
    positions: Array
    selected: Array
    selected_counts: Array
    drawn: Drawn | None = None

    def args(self, d: Dims, k_max: int) -> merge_args:
        """The arguments, without the other side's lists; binds rows and k. Raises ContractError."""
        d.match("entries", self.entries, "rows", "k", dtype=DType.U64)
        for name in ("counts", "positions", "selected_counts"):
            d.match(name, getattr(self, name), "rows", dtype=DType.I32)
        d.match("selected", self.selected, "rows", "k", dtype=DType.I32)
        d.require(d["k"] <= k_max, f"k is {d['k']}, expected at most {k_max}")
        args = merge_args(
            entries=self.entries.address,
            counts=self.counts.address,
            positions=self.positions.address,
            selected=self.selected.address,
            selected_counts=self.selected_counts.address,
            k=d["k"],
        )
        if self.drawn is not None:
            d.match("drawn.selections", self.drawn.selections, "draws", "k", dtype=DType.I32)
            d.match("drawn.index", self.drawn.index, 1, dtype=DType.U32)
            args.drawn, args.draw_index, args.draws = self.drawn.selections.address, self.drawn.index.address, d["draws"]
        return args


def words(rows: int, k: int) -> int:
    """Words of a mailbox that an exchange of `rows` rows needs in each of its two sets."""
    return rows * (2 * k + 1)


def select_words(rows: int) -> int:
    """The same of `select`."""
    return words(rows, SENT)


def merge(stream: Stream, lists: Lists, other_entries: Array, other_counts: Array) -> None:
    """The selection from this side's lists and the other's, other_entries [rows, k] u64 and other_counts [rows] i32 on this device.

    Any number of rows. Raises ContractError.
    """
    d = Dims("merge_lists")
    args = lists.args(d, stream.device.kernel("merge_lists").constants["k_max"])
    d.match("other_entries", other_entries, "rows", "k", dtype=DType.U64)
    d.match("other_counts", other_counts, "rows", dtype=DType.I32)
    args.other_entries, args.other_counts = other_entries.address, other_counts.address
    launch(stream, "merge_lists", (d["rows"], 1, 1), args)


def exchange(
    stream: Stream,
    lists: Lists,
    outbox: int,
    inbox: int,
    counter: Array,
    per_step: int,
    index: int,
    capacity: int,
    error: Array,
    budget: int,
) -> None:
    """Sends this side's lists, receives the other's, selects: one launch, beside the other side's own. It may be captured and replayed.

    outbox, inbox: addresses of the mailboxes of the other device and of this one, [2, capacity] u64, capacity at least `words`; counter [1] u32:
    steps done; the exchange is number `index`, from 1, of `per_step` in each step; error [1] u32 becomes the number of an exchange that got no
    answer within `budget` polls of a wait (mailbox.h): its rows then select nothing. Raises ContractError.
    """
    d = Dims("exchange_lists")
    args = lists.args(d, stream.device.kernel("exchange_lists").constants["k_max"])
    d.match("counter", counter, 1, dtype=DType.U32)
    d.match("error", error, 1, dtype=DType.U32)
    needed = words(d["rows"], d["k"])
    d.require(capacity >= needed, f"capacity is {capacity}, expected at least {needed} words for {d['rows']} rows of {d['k']} entries")
    require_index(d, "index", index, per_step)
    d.require(budget >= 1, f"budget is {budget}, expected at least 1")
    whole = exchange_lists_args(
        lists=args,
        outbox=outbox,
        inbox=inbox,
        counter=counter.address,
        error=error.address,
        budget=budget,
        per_step=per_step,
        index=index,
        capacity=capacity,
        waiting_blocks=d["rows"],
    )
    launch(stream, "exchange_lists", (d["rows"], 1, 1), whole)


def select(stream: Stream, selector: Selector, lists: Lists, share: Shard, extent_rows: int, mail: SumMail, blocks: int | None = None) -> None:
    """`Selector.topk` of a side and `exchange` in one launch, beside the other side's own: the same selection. It may be captured and replayed.

    After `selector.score` of the same rows. lists: entries and counts are scratch; blocks: a row, None: from the compute units, and on both sides any
    number. Raises ContractError.
    """
    d = Dims("step_topk_both")
    kernel = stream.device.kernel("step_topk_both").constants
    args = select_both_args(topk=selector.topk_args(d, stream.device, lists.positions, lists.entries, lists.counts, blocks, share, extent_rows))
    args.mail.lists = lists.args(d, kernel["k_max"])
    d.require(share.count == 2, f"share is {share}, expected a side of a pair")
    needed = select_words(d["rows"])
    d.require(needed <= mail.words_max, f"lists have up to {needed} words, expected at most {mail.words_max}")
    mail.bind(d, args.mail, needed, args.topk.blocks * d["rows"])
    launch(stream, "step_topk_both", (args.topk.blocks, d["rows"], 1), args)


def cost_merge(rows: int, k: int) -> Cost:
    """Both lists of every row read, the selection written."""
    return Cost(rows * (2 * 8 * k + 4 * k), 0)


def cost_exchange(rows: int, k: int) -> Cost:
    """Of one side: its lists read, words sent and received, the selection written."""
    return Cost(rows * 8 * k + 2 * 8 * words(rows, k) + 4 * rows * k, 0)
