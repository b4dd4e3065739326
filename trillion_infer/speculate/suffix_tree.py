"""A suffix tree of bounded depth over texts that grow, with the count of each path.

Online, with work per token bounded by the depth. A leaf is a place in a text and stays one while the text grows; it
unfolds by a node only when a second suffix reaches it, so text that repeats nothing costs one node per token.
"""

from collections.abc import Sequence

NodeChildren = dict[int, "Node"]


class Node:
    """The end of a path. count: occurrences; text and at: where one of them goes on (the newest, once unfolded)."""

    __slots__ = ("at", "children", "count", "text")

    def __init__(self, text: list[int], at: int, count: int = 1):
        self.text, self.at, self.count = text, at, count
        self.children: NodeChildren | None = None


class SuffixTree:
    """Suffixes of texts, each down to `depth` tokens. Texts enter by `SuffixFeed`."""

    def __init__(self, depth: int):
        self.depth = depth
        self.root = Node([], 0, 0)
        self.root.children = {}
        self.size = 0
        """Nodes, and tokens of texts: what the tree's memory is proportional to."""

    def follow(self, tokens: Sequence[int]) -> Node | None:
        """The end of the path with these tokens, None if they never occurred."""
        node, left = self.root, list(tokens)
        for place, token in enumerate(left):
            if node.children is None:
                rest = left[place:]
                if node.text[node.at : node.at + len(rest)] != rest:
                    return None
                return Node(node.text, node.at + len(rest), node.count)
            child = node.children.get(token)
            if child is None:
                return None
            node = child
        return node

    def longest_match(self, tokens: Sequence[int], shortest: int) -> tuple[Node, int] | None:
        """End of the longest suffix of `tokens` that occurs and goes on, and its length, if at least `shortest`."""
        best, low, high = None, shortest, min(self.depth - 1, len(tokens))
        while low <= high:  # what goes on at one length does so at each shorter one
            length = (low + high) // 2
            node = self.follow(tokens[len(tokens) - length :])
            if node is not None and (node.children or node.at < len(node.text)):
                best, low = (node, length), length + 1
            else:
                high = length - 1
        return best

    def continuation(self, node: Node, count: int, trust: float, least: float) -> tuple[list[int], list[float]]:
        """The likeliest tokens after `node`, and the chance of each: its share among those seen, times `trust`.

        Ends at `count` tokens or before the product of the chances falls below `least`.
        """
        tokens: list[int] = []
        chances: list[float] = []
        product = 1.0
        while len(tokens) < count:
            if node.children:
                token, child = max(node.children.items(), key=lambda item: item[1].count)
                share = child.count / max(1, sum(other.count for other in node.children.values()))
            elif node.children is None and node.at < len(node.text):
                token, child, share = node.text[node.at], Node(node.text, node.at + 1), 1.0
            else:
                break
            product *= share * trust
            if product < least:
                break
            tokens.append(token)
            chances.append(share * trust)
            node = child
        return tokens, chances


class SuffixFeed:
    """Enters one growing text into a tree."""

    def __init__(self, tree: SuffixTree):
        self._tree = tree
        self._text: list[int] = []
        self._active: list[tuple[Node, int]] = []  # suffixes that occurred before: path end and length, longest first

    def __len__(self) -> int:
        return len(self._text)

    def append(self, token: int) -> None:
        tree, text = self._tree, self._text
        text.append(token)
        tree.size += 1
        going_on: list[tuple[Node, int]] = []
        for node, length in (*self._active, (tree.root, 0)):
            children = node.children
            if children is None:
                children = self._unfold(node)
            child = children.get(token)
            if child is None:
                children[token] = Node(text, len(text))
                tree.size += 1
                continue
            child.count += 1
            deepest = length + 1 == tree.depth
            if child.children is not None or deepest:
                child.text, child.at = text, len(text)
            if not deepest:
                going_on.append((child, length + 1))
        self._active = going_on

    def _unfold(self, node: Node) -> NodeChildren:
        """Give a leaf its one known child: the token that followed its first occurrence."""
        node.children = {}
        if node.at < len(node.text) - (node.text is self._text):
            node.children[node.text[node.at]] = Node(node.text, node.at + 1, max(1, node.count - 1))
            self._tree.size += 1
        return node.children
