"""The prefix cache of a hybrid model: a tree of token pages, some of whose nodes keep a recurrent state.

Latent rows can be reused at any page; the KDA state only where it was saved. A hit therefore ends at a node with a
snapshot, and pages below which no snapshot lies are useless and freed at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from anabranch.engine.cache import PAGE, FreeList


class Node:
    """One full page of tokens behind its parent's. `refs` counts requests that hang here; `used` orders evictions."""

    __slots__ = ("children", "depth", "key", "page", "parent", "refs", "snapshot", "used")

    def __init__(self, parent: "Node | None", key: tuple[int, ...], page: int) -> None:
        self.parent, self.key, self.page = parent, key, page
        self.children: dict[tuple[int, ...], Node] = {}
        self.depth: int = 0 if parent is None else parent.depth + PAGE
        self.snapshot: int | None = None
        self.refs = self.used = 0

    def path(self) -> list["Node"]:
        """Nodes from the first page to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class Saved:
    """A state after `depth` tokens, in a snapshot slot; `finite` is a bool tensor on the host once its step landed."""

    depth: int
    slot: int
    finite: torch.Tensor


class PrefixCache:
    """Owns the pages and snapshot slots that finished work left behind, and gives them back when they are needed."""

    def __init__(self, pages: FreeList, snapshots: FreeList) -> None:
        self.pages, self.snapshots = pages, snapshots
        self.root = Node(None, (), -1)
        self._clock = 0

    def match(self, tokens: Sequence[int], limit: int) -> Node | None:
        """The deepest node with a snapshot whose tokens begin `tokens` and number at most `limit`."""
        node, best = self.root, None
        for start in range(0, limit - PAGE + 1, PAGE):
            child = node.children.get(tuple(tokens[start : start + PAGE]))
            if child is None:
                break
            node = child
            if node.snapshot is not None:
                best = node
        if best is not None:
            self._touch(best)
        return best

    def extend(self, node: Node | None, key: tuple[int, ...], page: int) -> Node:
        """The child of `node` (None is the root) for one page of tokens; `page` is adopted if the child is new."""
        parent = node or self.root
        child = parent.children.get(key)
        if child is None:
            child = parent.children[key] = Node(parent, key, page)
        return child

    def attach(self, node: Node) -> None:
        """A request hangs on `node`: neither it nor its ancestors can be evicted."""
        node.refs += 1
        self._touch(node)

    def detach(self, node: Node) -> None:
        """The request moved on or ended."""
        assert node.refs > 0
        node.refs -= 1
        self._prune(node)

    def take_snapshot_slot(self) -> int | None:
        """A free slot, or that of the least recently used snapshot; None if there are no slots at all."""
        if len(self.snapshots):
            return self.snapshots.take()
        holders = [n for n in self._nodes() if n.snapshot is not None]
        if not holders:
            return None
        oldest = min(holders, key=lambda n: n.used)
        slot, oldest.snapshot = oldest.snapshot, None
        self._prune(oldest)
        return slot

    def keep(self, node: Node, slot: int) -> None:
        """`slot` holds the state after `node`'s last token."""
        assert node.snapshot is None
        node.snapshot = slot

    def free_a_page(self) -> bool:
        """Evict the least recently used leaf that no request needs; False if there is none."""
        leaves = [n for n in self._nodes() if not n.children and not n.refs]
        if not leaves:
            return False
        oldest = min(leaves, key=lambda n: n.used)
        if oldest.snapshot is not None:
            self.snapshots.give(oldest.snapshot)
            oldest.snapshot = None
        self._prune(oldest)
        return True

    def evictable(self) -> int:
        """Pages that eviction could free now."""
        return sum(1 for _ in self._nodes()) - len(self._needed())

    def flush(self) -> None:
        """Forget everything that no running request needs."""
        while self.free_a_page():
            pass

    def _needed(self) -> set[Node]:
        return {node for holder in self._nodes() if holder.refs for node in holder.path()}

    def _nodes(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _touch(self, node: Node) -> None:
        self._clock += 1
        while node.parent is not None:
            node.used, node = self._clock, node.parent

    def _prune(self, node: Node) -> None:
        """Free `node` and its ancestors as far as nothing hangs on them and no state is saved there."""
        while node.parent is not None and not node.children and not node.refs and node.snapshot is None:
            del node.parent.children[node.key]
            self.pages.give(node.page)
            node = node.parent
