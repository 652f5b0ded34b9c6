"""Dynamic context parallelism: long documents are cut over many ranks, short ones over none.

Ranks form groups, made before any document is seen: with cp = 8, eight of 1, four of 2, two of 4
neighbours, one of 8. Each document of a row is given the smallest group on which neither its work
a rank, which grows with the square of its length, is above the row's mean, nor its tokens a rank
above what a rank has room for: of these groups that with the least work so far, long documents
first. A document is cut in zigzag over its group (`context`), so what attention sends stays inside.

    16 tokens, cp = 4      documents of 6, 4, 4 and 2 tokens: 36 + 16 + 16 + 4 work, 18 a rank
    6 on ranks 0 and 1, 3 tokens and 18 work each; 4 on rank 2; 4 on rank 3; 2 on 0 and 1 again

All ranks have as many tokens, and padding, which costs nothing, may be anywhere. Where whole
documents do not come out even, the shortest are dealt again, as sums that fill each rank exactly
(subset sums, by dynamic programming on the bits of an integer); what still is left over is cut
over the smallest group that has room, in uneven pieces if need be.
"""

from collections.abc import Sequence

SLACK = 1.05
"""Work of a document on a rank, of the row's mean, up to which it is cut no further."""
EVEN = 1.2
"""Work of a rank, of the mean, up to which a row's largest group is no larger for balance alone."""
REFILL = 16
"""Documents a rank that are dealt again."""

Part = tuple[int, list[int]]
"""The first rank of a document's group, and the tokens that each of its ranks gets."""


def deal(sizes: Sequence[int], room: int, groups: Sequence[int]) -> list[Part]:
    """Returns the Part of each document of a row, of so many tokens, on ranks with room for so
    many each; `groups`: the sizes of groups, 1 first and all ranks last. The same wherever it is
    asked. Raises ValueError where the documents, together, have more tokens than there is room."""
    mean = sum(size * size for size in sizes) / groups[-1]

    def fits(size: int, group: int) -> bool:
        return size * size <= SLACK * mean * group and size <= room * group

    asked = [next((g for g in groups if fits(n, g)), groups[-1]) for n in sizes]
    made = []
    for largest in groups:
        if largest >= max(asked, default=1):
            made.append(_dealt(sizes, asked, room, groups, SLACK * mean, largest))
            if made[-1].level <= largest and max(made[-1].work) <= EVEN * mean:
                break
    best = min(made, key=lambda one: max(one.work))
    return [best.parts[d] for d in range(len(sizes))]


def _dealt(sizes, asked, room: int, groups: Sequence[int], limit: float, largest: int) -> "_Deal":
    """Returns documents dealt, the longest first; if then some group is larger than `largest`, once
    more, the shortest so that they fill ranks, or as before, where that is no better."""
    longest = sorted(range(len(sizes)), key=lambda d: -sizes[d])
    first = _Deal(sizes, asked, room, groups, limit, largest)
    first.place(longest)
    if first.level <= largest:
        return first
    last = sorted([d for d in longest if asked[d] == 1][-REFILL * groups[-1] :])
    chosen = set(last)
    before = [d for d in longest if d not in chosen]
    widest = max((-(-sizes[d] // asked[d]) for d in before), default=0)
    kept = min(sum(sizes[d] for d in last) // (2 * groups[-1]), room - widest)  # for the last
    again = _Deal(sizes, asked, room - kept, groups, limit, largest)
    again.place(before)
    again.room = [tokens + kept for tokens in again.room]
    again.place(again.fill(last))
    return min(first, again, key=lambda one: (one.level, max(one.work)))


class _Deal:
    """Ranks of a row, and what they were dealt so far."""

    def __init__(self, sizes, asked, room: int, groups: Sequence[int], limit: float, largest: int):
        self.sizes, self.asked, self.groups = sizes, asked, groups
        self.limit, self.largest = limit, largest
        self.room, self.work = [room] * groups[-1], [0] * groups[-1]
        self.parts: dict[int, Part] = {}
        self.level = 1
        """The largest group that a document has."""

    def place(self, documents: Sequence[int]) -> None:
        """Deals documents to groups of the size they ask for; where none has room, or some rank
        would have work above the limit, to larger ones, for work's sake up to the largest."""
        for d in documents:
            self._give(d, *self._found(self.sizes[d], self.asked[d]))

    def _found(self, size: int, asked: int) -> Part:
        for group in self.groups:
            part = self._placed(size, group) if group >= asked else None
            if part and (group >= self.largest or self._within(size, *part)):
                return part
        raise ValueError(f"{size} tokens have no room among {self.room}")

    def _within(self, size: int, first: int, pieces: list[int]) -> bool:
        ranks = enumerate(pieces, start=first)
        return all(self.work[rank] + size * piece <= self.limit for rank, piece in ranks)

    def _placed(self, size: int, group: int) -> Part | None:
        """The Part of a document on a group of that size: with the least work of those with room
        for even pieces, or else in uneven ones where there is the most room."""
        starts, piece = range(0, len(self.work), group), -(-size // group)
        free = [r for r in starts if min(self.room[r : r + group]) >= piece]
        if free:
            return self._cut(size, min(free, key=lambda r: max(self.work[r : r + group])), group)
        most = max(starts, key=lambda r: sum(self.room[r : r + group]))
        enough = sum(self.room[most : most + group]) >= size
        return self._cut(size, most, group) if enough else None

    def _cut(self, size: int, first: int, group: int) -> Part:
        """The pieces of a document on a group, as even as there is room for."""
        pieces = [0] * group
        by_room = sorted(range(group), key=lambda i: self.room[first + i])
        for nth, i in enumerate(by_room):
            pieces[i] = min(self.room[first + i], size // (group - nth))
            size -= pieces[i]
        return first, pieces

    def _give(self, d: int, first: int, pieces: list[int]) -> None:
        self.parts[d] = first, pieces
        self.level = max(self.level, len(pieces))
        for rank, piece in enumerate(pieces, start=first):
            self.room[rank] -= piece
            self.work[rank] += piece * self.sizes[d]

    def fill(self, documents: Sequence[int]) -> list[int]:
        """Fills each rank, that with the least work first, with whole documents whose tokens come
        as near to its room as any can. Returns those left."""
        for rank in sorted(range(len(self.work)), key=lambda r: self.work[r]):
            # Bit n of sums[i]: some of the first i documents have n tokens together.
            within, sums = (1 << self.room[rank] + 1) - 1, [1]
            for d in documents:
                sums.append((sums[-1] | sums[-1] << self.sizes[d]) & within)
            total, left = sums.pop().bit_length() - 1, []
            for d in reversed(documents):
                if sums.pop() >> total & 1:
                    left.append(d)
                else:
                    total -= self.sizes[d]
                    self._give(d, rank, [self.sizes[d]])
            documents = left[::-1]
        return list(documents)
