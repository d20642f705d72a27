"""How does a model's next incarnation come to be? Its channel in the run directory, then its process."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import zmq
from anyio.abc import TaskGroup

from runtime.actors.blas import BlasChoice, choose_blas
from runtime.actors.process import WorkerProcess, spawn_worker, worker_command, worker_environment
from runtime.config import ModelSpec, Settings
from runtime.protocol.channel import HostChannel
from runtime.protocol.ids import Incarnation


class Launcher:
    """Starts workers. `group` runs the tasks that read their stderr. Which BLAS they get is found out at the first need."""

    def __init__(self, group: TaskGroup, directory: Path, settings: Settings) -> None:
        self._group = group
        self._directory = directory
        self._settings = settings
        self._blas: BlasChoice | None = None
        self._choosing = anyio.Lock()

    async def __call__(self, spec: ModelSpec, key: str, incarnation: Incarnation) -> tuple[WorkerProcess, HostChannel]:
        """:raises OSError: the process cannot be started; nothing is left."""
        changes = {} if spec.kind == "fake" else (await self._choose_blas()).changes
        try:
            channel = HostChannel(self._directory, key)
        except zmq.ZMQError as error:  # for instance no descriptor is left
            raise OSError(error.errno, f"its channel cannot be opened: {error}") from error
        try:
            process = await spawn_worker(
                self._group,
                worker_command(self._directory, key, incarnation),
                environment=worker_environment(os.environ, changes, self._directory),
                model=spec.name,
                incarnation=incarnation,
            )
        except BaseException:
            channel.close()
            raise
        return process, channel

    async def _choose_blas(self) -> BlasChoice:
        async with self._choosing:
            if self._blas is None:
                self._blas = await choose_blas(self._settings.blas, self._directory)
            return self._blas
