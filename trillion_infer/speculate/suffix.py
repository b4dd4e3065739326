"""Drafts from a suffix tree over the request and over earlier requests of its tenant (arXiv 2411.04975)."""

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

from trillion_infer.speculate.base import NOTHING, Draft, Drafter, DraftRequest
from trillion_infer.speculate.suffix_tree import SuffixFeed, SuffixTree


class TenantTexts:
    """A tenant's finished texts in two trees, so that the oldest half goes when `max_size` is reached."""

    def __init__(self, depth: int, max_size: int):
        self._depth, self._max_size = depth, max_size
        self._newest, self._older = SuffixTree(depth), SuffixTree(depth)
        self._waiting: deque[Sequence[int]] = deque()
        self._feed: SuffixFeed | None = None

    @property
    def trees(self) -> tuple[SuffixTree, SuffixTree]:
        return self._newest, self._older

    @property
    def size(self) -> int:
        """Nodes and tokens held."""
        return self._newest.size + self._older.size

    def add(self, text: Sequence[int]) -> None:
        """Take a finished text, to be entered bit by bit by `absorb`. Texts that come faster than that push out
        the oldest still waiting."""
        self._waiting.append(text[-self._max_size // 2 :])
        while sum(map(len, self._waiting)) > self._max_size:
            self._waiting.popleft()
            self._feed = None

    def absorb(self, limit: int) -> int:
        """Enter up to `limit` waiting tokens; how many they were."""
        entered = 0
        while entered < limit and self._waiting:
            text = self._waiting[0]
            if self._feed is None:
                self._feed = SuffixFeed(self._newest)
            done = len(self._feed)
            for token in text[done : done + limit - entered]:
                self._feed.append(token)
            entered += len(self._feed) - done
            full = self._newest.size > self._max_size // 2
            if full:
                self._newest, self._older = SuffixTree(self._depth), self._newest
            if full or len(self._feed) >= len(text):
                self._waiting.popleft()
                self._feed = None
        return entered


class SuffixDrafter(Drafter):
    """Follows the longest match of the newest tokens, in the request's own text first, then in its tenant's.

    depth: longest path; shortest: tokens that must match; least: the chance of standing below which a draft ends;
    per_step: tokens of all requests, and of finished ones, entered in one call; max_size: nodes and tokens kept per
    tenant, about 90 bytes each; max_tenants: the least recently used tenant is forgotten beyond that.
    """

    name = "suffix"

    def __init__(
        self,
        *,
        depth: int = 16,
        shortest: int = 2,
        least: float = 0.1,
        per_step: int = 1024,
        max_size: int = 500_000,
        max_tenants: int = 16,
    ):
        self._depth, self._shortest, self._least, self._per_step = depth, shortest, least, per_step
        self._max_size, self._max_tenants = max_size, max_tenants
        self._own: dict[Hashable, tuple[SuffixTree, SuffixFeed]] = {}
        self._tenants: OrderedDict[str, TenantTexts] = OrderedDict()

    def propose(self, requests: Sequence[DraftRequest], k: int) -> list[Draft]:
        left = self._per_step
        for request in requests:
            left -= self._enter(request, left)
        for tenant in {request.tenant for request in requests}:
            left -= self._tenant(tenant).absorb(left)
        return [self._propose(request, k) for request in requests]

    def release(self, request: DraftRequest) -> None:
        if self._own.pop(request.request_id, None) is not None:
            self._tenant(request.tenant).add(tuple(request.tokens))

    def _tenant(self, name: str) -> TenantTexts:
        texts = self._tenants.get(name)
        if texts is None:
            texts = self._tenants[name] = TenantTexts(self._depth, self._max_size)
            if len(self._tenants) > self._max_tenants:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(name)
        return texts

    def _propose(self, request: DraftRequest, k: int) -> Draft:
        if k < 1:
            return NOTHING
        tree, _ = self._own[request.request_id]
        texts = self._tenant(request.tenant)
        recent = list(request.tokens[-self._depth :])
        best = NOTHING
        for candidate in (tree, *texts.trees):
            found = candidate.longest_match(recent, self._shortest)
            if found is None:
                continue
            node, length = found
            tokens, chances = candidate.continuation(node, k, length / (length + 1), self._least)
            draft = Draft(tuple(tokens), tuple(chances), self.name)
            if draft.expected > best.expected:
                best = draft
        return best

    def _enter(self, request: DraftRequest, limit: int) -> int:
        """Put up to `limit` more of the request's tokens into its tree; how many they were."""
        own = self._own.get(request.request_id)
        if own is None:
            tree = SuffixTree(self._depth)
            own = self._own[request.request_id] = tree, SuffixFeed(tree)
        _, feed = own
        new = request.tokens[len(feed) : len(feed) + limit]
        for token in new:
            feed.append(token)
        return len(new)
