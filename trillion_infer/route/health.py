"""Looks at every worker's /health again and again."""

import asyncio
import logging
from typing import Any

import httpx

from trillion_infer.route.worker import Worker

_MISSES = 2


class HealthPoller:
    """Sets `Worker.up`. A worker goes down after two bad answers in a row, or one before its first good one."""

    def __init__(self, workers: list[Worker], client: httpx.AsyncClient, interval_s: float):
        self._workers, self._client, self._interval_s = workers, client, interval_s
        self._log = logging.getLogger(__name__)
        self._missed = {worker.url: _MISSES - 1 for worker in workers}

    async def look(self) -> None:
        """One look at all workers."""
        await asyncio.gather(*(self._look_at(worker) for worker in self._workers))

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.look()

    async def _look_at(self, worker: Worker) -> None:
        try:
            answer = await self._client.get(f"{worker.url}/health", timeout=max(1.0, self._interval_s))
            good = answer.status_code == 200
        except (httpx.HTTPError, httpx.InvalidURL):
            good = False
        else:
            worker.told(_state(answer) if good else {})
            if good and worker.blocks_seen is not None:
                await self._ask_blocks(worker, *worker.blocks_seen)
        self._missed[worker.url] = 0 if good else self._missed[worker.url] + 1
        if good:
            worker.up = True
        elif worker.up and self._missed[worker.url] >= _MISSES:
            worker.up = False
            worker.lost()

    async def _ask_blocks(self, worker: Worker, epoch: str, count: int) -> None:
        """Learns which prefixes the worker has stored and removed since it was last asked."""
        try:
            url = f"{worker.url}/blocks?epoch={epoch}&count={count}"
            answer = await self._client.get(url, timeout=max(1.0, self._interval_s))
            if answer.status_code == 200:
                worker.told_blocks(answer.json())
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            self._log.warning("%s tells of no blocks", worker.url)


def _state(answer: httpx.Response) -> dict[str, Any]:
    """What a server tells of itself; nothing where its answer is no JSON object, as those of other makes are."""
    try:
        state = answer.json()
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}
