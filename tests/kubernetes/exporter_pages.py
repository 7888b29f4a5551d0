"""The pages of the exporters in a namespace's pods, as a Prometheus would have them."""

from contextlib import suppress
from threading import Event, Thread

from tests.kubernetes.cluster import PORT, Namespace, Pod, get


class Pages:
    """The last page of each pod's exporter, scraped each second as Prometheus would: each pod by a thread of its own.

    One after the other they would wait for the pods that have gone, and miss the last page of those that are about to.
    """

    def __init__(self, namespace: Namespace) -> None:
        self._namespace, self._stop, self._latest = namespace, Event(), dict[str, str]()
        self._threads, self._ended = dict[str, Thread](), set[str]()
        self._find()
        self._finder = Thread(target=self._look_for_more, daemon=True)
        self._finder.start()

    def __getitem__(self, pod: Pod) -> str:
        return self._latest[pod.name]

    def close(self) -> None:
        """Stop scraping."""
        self._stop.set()
        for one in (self._finder, *self._threads.values()):
            one.join()

    def _look_for_more(self) -> None:
        while not self._stop.wait(1.0):
            with suppress(AssertionError, OSError):  # an API server that is busy is asked again
                self._find()

    def _find(self) -> None:
        for one in self._namespace.pods():
            if one.phase in {"Succeeded", "Failed"}:
                self._ended.add(one.name)  # its address is another's soon
            elif one.ip and one.name not in self._threads:
                self._threads[one.name] = Thread(target=self._scrape, args=(one.name, f"{one.ip}:{PORT}"), daemon=True)
                self._threads[one.name].start()

    def _scrape(self, name: str, address: str) -> None:
        while not self._stop.wait(1.0) and name not in self._ended:
            if text := get(address, User_Agent="tests", X_Prometheus_Scrape_Timeout_Seconds="2")[1]:
                self._latest[name] = text
