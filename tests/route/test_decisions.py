"""The pieces that decide, without HTTP."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trillion_infer.core.errors import ConfigError, QueueFullError
from trillion_infer.core.prompt_prefix import BLOCK_BYTES, prefix_hashes
from trillion_infer.route.affinity import SessionHomes, preference, session_cap
from trillion_infer.route.breaker import Breaker
from trillion_infer.route.config import RouterConfig, check_pools, option_help
from trillion_infer.route.policy import NoWorkerError, Policy
from trillion_infer.route.prefix import PrefixIndex
from trillion_infer.route.request import view_request

pytestmark = pytest.mark.smoke
WORKERS = [f"http://w{i}" for i in range(3)]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_policy(**options) -> Policy:
    return Policy(RouterConfig(tuple(WORKERS), **options), Clock())


def make_call(policy: Policy, prompt: str, session: str | None = None, **fields):
    return policy.call(view_request("/v1/completions", {"prompt": prompt, **fields}), session, "")


@given(st.permutations(WORKERS), st.text(min_size=1))
def test_preference_is_the_same_for_every_order_of_workers(workers, session):
    assert preference(session, workers) == preference(session, WORKERS)


@given(st.text(min_size=1), st.sampled_from(WORKERS))
def test_a_worker_that_leaves_moves_only_its_own_sessions(session, gone):
    left = [worker for worker in WORKERS if worker != gone]
    assert preference(session, left) == [worker for worker in preference(session, WORKERS) if worker != gone]


@given(st.lists(st.text(min_size=1), min_size=1, max_size=200), st.integers(1, 8))
def test_no_worker_holds_more_sessions_than_the_bound(sessions, count):
    workers = [f"http://w{i}" for i in range(count)]
    homes = SessionHomes(1.25, 1000, 60.0, Clock())
    for session in sessions:
        homes.home(session, workers)
    homes.check_integrity()
    assert max(homes.counts().values()) <= session_cap(len(set(sessions)), count, 1.25)


@given(st.lists(st.tuples(st.integers(0, 9), st.sets(st.sampled_from(WORKERS), min_size=1), st.integers(0, 40))))
def test_a_home_stays_while_its_worker_is_up_and_the_session_is_alive(steps):
    clock = Clock()
    homes = SessionHomes(1.25, 1000, 60.0, clock)
    last: dict[int, tuple[str, float]] = {}
    for session, up, seconds in steps:
        clock.now += seconds
        home = homes.home(str(session), sorted(up))
        assert home in up
        if session in last and last[session][0] in up and clock.now - last[session][1] <= 60:
            assert home == last[session][0]
        last[session] = (home, clock.now)
        homes.check_integrity()


def test_replicas_that_see_sessions_in_other_orders_agree_on_most_homes():
    sessions = [f"agent-{i}" for i in range(600)]
    one, two = (SessionHomes(1.25, 1000, 60.0, Clock()) for _ in range(2))
    first = {session: one.home(session, WORKERS) for session in sessions}
    second = {session: two.home(session, WORKERS[::-1]) for session in reversed(sessions)}
    same = sum(first[session] == second[session] for session in sessions)
    assert same >= 0.9 * len(sessions), same


def test_the_session_table_is_bounded():
    homes = SessionHomes(1.25, 10, 60.0, Clock())
    for i in range(100):
        homes.home(str(i), WORKERS)
    assert sum(homes.counts().values()) <= 11


@given(st.binary(max_size=4 * BLOCK_BYTES), st.binary(max_size=2 * BLOCK_BYTES), st.binary(max_size=2 * BLOCK_BYTES))
def test_a_prefix_matches_exactly_its_common_whole_blocks(shared, mine, yours):
    index = PrefixIndex(1000)
    index.add(prefix_hashes(shared + mine))
    one, two = shared + mine, shared + yours
    common = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    assert index.match(prefix_hashes(two)) == common // BLOCK_BYTES


def test_prefixes_of_different_tenants_never_match():
    prompt = b"x" * 4 * BLOCK_BYTES
    index = PrefixIndex(1000)
    index.add(prefix_hashes(prompt, b"one"))
    assert index.match(prefix_hashes(prompt, b"two")) == 0


@given(st.lists(st.binary(min_size=BLOCK_BYTES, max_size=6 * BLOCK_BYTES), max_size=20), st.integers(1, 8))
def test_a_full_index_forgets_whole_chains_from_their_ends(prompts, capacity):
    index = PrefixIndex(capacity)
    for prompt in prompts:
        index.add(prefix_hashes(prompt))
        assert len(index) <= capacity
    for prompt in prompts:
        hashes = prefix_hashes(prompt)
        known = [index.match(hashes[: i + 1]) == i + 1 for i in range(len(hashes))]
        assert known == sorted(known, reverse=True)


def test_a_circuit_opens_cools_tries_once_and_closes():
    clock = Clock()
    breaker = Breaker(3, 5.0, clock)
    for _ in range(3):
        assert breaker.allows()
        breaker.fail()
    assert not breaker.allows()
    clock.now = 5.0
    assert breaker.allows()
    breaker.start()
    assert not breaker.allows(), "only one trial at a time"
    breaker.fail()
    clock.now = 14.9
    assert not breaker.allows(), "a failed trial doubles the cooldown"
    clock.now = 15.0
    breaker.start()
    breaker.succeed()
    assert breaker.state == "closed"


def test_requests_go_where_the_least_work_is_in_flight():
    policy = make_policy()
    for i in range(30):
        policy.choose(make_call(policy, f"{i}" * 400, max_tokens=10))
    assert {worker.requests for worker in policy.workers.values()} == {10}


def test_one_long_prompt_weighs_as_much_as_many_short_ones():
    policy = make_policy()
    long = policy.choose(make_call(policy, "x" * 400_000, max_tokens=1)).lease.worker
    for i in range(100):
        assert policy.choose(make_call(policy, f"{i}" * 40, max_tokens=1)).lease.worker is not long


def test_a_known_prefix_draws_a_request_to_its_worker():
    policy = make_policy()
    first = policy.choose(make_call(policy, "s" * 20_000))
    first.lease.succeed()
    second = policy.choose(make_call(policy, "s" * 20_000 + "tail"))
    assert (second.lease.worker, second.reason) == (first.lease.worker, "prefix")


@given(st.lists(st.sampled_from(["first_token", "token", "succeed", "fail", "abandon"]), max_size=60))
def test_a_lease_gives_back_all_it_took(calls):
    policy = make_policy(breaker_failures=1000)
    lease = policy.choose(make_call(policy, "x" * 4000, max_tokens=20)).lease
    for call in [*calls, "abandon"]:
        getattr(lease, call)()
    assert (lease.worker.requests, lease.worker.prefill_tokens, lease.worker.decode_tokens) == (0, 0, 0)


def test_full_workers_refuse_and_absent_workers_are_another_error():
    policy = make_policy(max_requests_per_worker=2)
    leases = [policy.choose(make_call(policy, "p")).lease for _ in range(6)]
    with pytest.raises(QueueFullError, match="try again later"):
        policy.choose(make_call(policy, "p"))
    leases[0].succeed()
    assert policy.choose(make_call(policy, "p")).lease.worker is leases[0].worker
    for worker in policy.workers.values():
        worker.up = False
    with pytest.raises(NoWorkerError, match="no worker"):
        policy.choose(make_call(policy, "p"))


def test_a_session_spills_when_its_home_is_overloaded_and_comes_home_again():
    policy = make_policy(spill_tokens=100)
    home = policy.choose(make_call(policy, "p", "s")).lease.worker
    burden = home.lease(100_000, 0)
    spilled = policy.choose(make_call(policy, "p", "s"))
    assert spilled.reason == "spill"
    assert spilled.lease.worker is not home
    burden.succeed()
    assert policy.choose(make_call(policy, "p", "s")).lease.worker is home


def test_estimates_learn_from_usage():
    policy = make_policy()
    view = view_request("/v1/completions", {"prompt": "x" * 8000})
    for _ in range(60):
        policy.estimator.learn(view, 4000, 32)
    assert abs(policy.estimator.prompt(view) - 4000) < 100
    assert abs(policy.estimator.output(view) - 32) <= 1


@given(st.dictionaries(st.sampled_from("prompt messages tools n max_tokens seed temperature stream input".split()),
                       st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                                    lambda inner: st.lists(inner, max_size=3)
                                    | st.dictionaries(st.text(), inner, max_size=3))))  # fmt: skip
def test_any_json_body_can_be_placed(body):
    policy = make_policy()
    policy.choose(policy.call(view_request("/v1/chat/completions", body), None, ""))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"workers": ()}, "empty"),
        ({"workers": ("a:1",)}, "not a base URL"),
        ({"workers": ("http://a:1/v1",)}, "without a path"),
        ({"workers": ("http://a:99999",)}, "not a base URL"),
        ({"workers": ("http://a:1", "http://a:1/")}, "more than once"),
        ({"on_worker_failure": "retry"}, "error, replay"),
        ({"balance": 1.0}, "above 1"),
        ({"max_attempts": 0}, "at least 1"),
        ({"idle_timeout_s": 0.0}, "positive"),
        ({"idle_timeout_s": float("nan")}, "positive"),
        ({"admin_key": ""}, "admin_key"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(options, says):
    with pytest.raises(ConfigError, match=says):
        RouterConfig(**{"workers": ("http://a:1",), **options})


def test_every_option_has_help():
    assert list(option_help()) == [field.name for field in dataclasses.fields(RouterConfig)]


@pytest.mark.parametrize(
    ("workers", "prefill", "decode", "says"),
    [
        ([], [], [], "--workers="),
        ([], ["http://p"], [], "--decode is empty"),
        ([], [], ["http://d"], "--prefill is empty"),
        (["http://w"], ["http://p"], ["http://d"], "servers without roles"),
    ],
)
def test_pools_that_cannot_serve_are_refused(workers, prefill, decode, says):
    with pytest.raises(ConfigError, match=says):
        check_pools(workers, prefill, decode)


def make_pools() -> Policy:
    """Two decode workers, two prefill workers that have told where they are."""
    policy = Policy(RouterConfig(("http://d0", "http://d1"), ("http://p0", "http://p1")), Clock())
    for name in ("p0", "p1"):
        policy.workers[f"http://{name}"].told({"role": "prefill", "handoff": f"{name}:1", "queued_tokens": 0})
    return policy


def test_clients_go_to_decode_workers_alone():
    policy = make_pools()
    urls = {policy.choose(make_call(policy, f"prompt {i}" * 50)).lease.worker.url for i in range(10)}
    assert urls == {"http://d0", "http://d1"}


def test_the_prefill_worker_with_the_shortest_queue_is_asked_first():
    policy = make_pools()
    policy.workers["http://p0"].told({"queued_tokens": 5000})
    assert policy.choose(make_call(policy, "x")).feeders == ("p1:1", "p0:1")


def test_prompts_on_their_way_count_until_the_first_token():
    policy = make_pools()
    first = policy.choose(make_call(policy, "a" * 4000))
    busy = first.feeders[0]
    assert policy.choose(make_call(policy, "b" * 40)).feeders[0] != busy
    first.lease.first_token()
    assert policy.workers[f"http://{busy[:2]}"].prefill_tokens == 0


def test_a_decode_worker_without_room_for_kv_is_passed_over():
    policy = make_pools()
    policy.workers["http://d0"].told({"kv_in_use": 0.95})
    assert {policy.choose(make_call(policy, f"{i}")).lease.worker.url for i in range(6)} == {"http://d1"}


def test_a_worker_that_changes_its_role_changes_its_pool():
    policy = make_pools()
    policy.workers["http://p1"].told({"role": "prefill", "next_role": "decode", "handoff": "p1:1"})
    choices = [policy.choose(make_call(policy, f"prompt {i}" * 50)) for i in range(12)]
    assert {choice.lease.worker.url for choice in choices} == {"http://d0", "http://d1", "http://p1"}
    assert {choice.feeders for choice in choices} == {("p0:1",)}
