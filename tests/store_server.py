"""A temporary PostgreSQL server for tests and benchmarks: its own data directory, its own socket, gone afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path


def binaries() -> Path | None:
    """The folder with initdb and pg_ctl, None if PostgreSQL is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    command = shutil.which("initdb")
    return found[-1].parent if found else Path(command).resolve().parent if command else None


class PostgreSQL:
    """A running server. `url(name)` makes a database and gives its SQLAlchemy URL."""

    def __init__(self, settings: dict[str, str] | None = None) -> None:
        self.bin = binaries()
        if self.bin is None:
            raise RuntimeError("PostgreSQL's server programs are not installed (Debian: apt-get install postgresql)")
        self.folder = Path(tempfile.mkdtemp(prefix="longstraw-pg-"))
        self.data = self.folder / "data"
        self.settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": str(self.folder), **(settings or {})}
        self.root = os.geteuid() == 0
        if self.root:
            shutil.chown(self.folder, "postgres")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._run("initdb", "-D", str(self.data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale")
        self.start()

    def _run(self, program: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [str(self.bin / program), *arguments]
        if self.root:  # the server refuses to run as root
            command = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *command]
        return subprocess.run(command, check=check, capture_output=True, text=True, cwd=self.folder)

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        options = " ".join(f"-c {name}={value}" for name, value in {**self.settings, "port": str(self.port)}.items())
        log = str(self.folder / "log")
        self._run("pg_ctl", "-D", str(self.data), "-l", log, "-o", options, "-w", "start")

    def stop(self, mode: str = "fast") -> None:
        """Stops the server; mode "immediate" is a crash."""
        self._run("pg_ctl", "-D", str(self.data), "-m", mode, "-w", "stop", check=False)

    def kill(self) -> None:
        """SIGKILL to the server's main process and waits until its children are gone, so that it can be started again."""
        pid = int((self.data / "postmaster.pid").read_text().split()[0])
        children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
        for process in (pid, *map(int, children)):
            os.kill(process, signal.SIGKILL)

    def url(self, name: str) -> str:
        """An empty database of this name; one that is there is emptied, which takes a fraction of the time of a new one."""
        import psycopg

        place = {"host": "127.0.0.1", "port": self.port, "user": "postgres", "autocommit": True}
        with psycopg.connect(**place) as connection:
            if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone():
                connection.execute(f'CREATE DATABASE "{name}" TEMPLATE template0')
        with psycopg.connect(**place, dbname=name) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}"

    def close(self) -> None:
        """Stops the server and deletes its data."""
        self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)
