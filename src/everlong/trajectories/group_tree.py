"""The turns of a group's episodes below their shared prompt: what they see alike is stored once.

Only context is shared. What an episode sampled belongs to that episode, even where another one sampled the same ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from everlong.contracts.tokens import TokenColumns
from everlong.trajectories.tree import common_prefix

SHARED = -1
"""Owner of a node through which several episodes pass."""


@dataclass(slots=True)
class Node:
    """A run of tokens that nothing branches off from, except at its end."""

    parent: int
    """-1 for a root."""
    columns: TokenColumns
    sampled: bool
    """False for context, which may be shared and split."""
    episodes: set[int]
    """Who passes through it."""
    branch: int = 0
    """The first of its episode's branches that passes through it."""
    children: list[int] = field(default_factory=list)

    @property
    def owner(self) -> int:
        return next(iter(self.episodes)) if len(self.episodes) == 1 else SHARED


class GroupTree:
    """A prefix tree over contexts, with what was sampled hung in between. Node numbers stay valid while it grows."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.roots: list[int] = []

    def add(self, parent: int, context: TokenColumns, sampled: TokenColumns, episode: int, branch: int = 0) -> int:
        """Hang `context` and then `sampled` below node `parent` (-1: as a root); returns the node at which they end."""
        node = self._add_context(parent, context, episode)
        return self._new(node, sampled, episode, sampled=True, branch=branch) if len(sampled) else node

    def path(self, node: int) -> list[int]:
        """Node numbers from the root to `node`, with it."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.nodes[node].parent
        return path[::-1]

    def preorder(self) -> Iterator[int]:
        """Every node after its parent, each subtree whole before the next; siblings in the order of their arrival."""
        stack = self.roots[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack += self.nodes[node].children[::-1]

    def children(self, parent: int) -> list[int]:
        return self.roots if parent < 0 else self.nodes[parent].children

    def _add_context(self, parent: int, context: TokenColumns, episode: int) -> int:
        while len(context):
            child = self._context_child(parent, int(context.ids[0]))
            if child is None:
                return self._new(parent, context, episode, sampled=False)
            length = common_prefix(context.ids, self.nodes[child].columns.ids)
            parent = child if length == len(self.nodes[child].columns) else self._split(child, length)
            self.nodes[parent].episodes.add(episode)
            context = context.slice(length, len(context))
        return parent

    def _context_child(self, parent: int, first_id: int) -> int | None:
        """At most one: contexts that begin alike were merged when the second one came."""
        for child in self.children(parent):
            if not self.nodes[child].sampled and self.nodes[child].columns.ids[0] == first_id:
                return child
        return None

    def _new(self, parent: int, columns: TokenColumns, episode: int, *, sampled: bool, branch: int = 0) -> int:
        self.nodes.append(Node(parent=parent, columns=columns, sampled=sampled, episodes={episode}, branch=branch))
        self.children(parent).append(len(self.nodes) - 1)
        return len(self.nodes) - 1

    def _split(self, node: int, length: int) -> int:
        """Put the first `length` tokens of a context node into a new parent of it, which is returned."""
        lower = self.nodes[node]
        upper = Node(lower.parent, lower.columns.slice(0, length), False, set(lower.episodes), children=[node])
        siblings = self.children(lower.parent)
        self.nodes.append(upper)
        siblings[siblings.index(node)] = lower.parent = len(self.nodes) - 1
        lower.columns = lower.columns.slice(length, len(lower.columns))
        return lower.parent
