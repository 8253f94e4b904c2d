"""One client for every server: proxies, an offline Hub, retries, and the key that nobody sees."""

import logging

import pytest
from small_http import AnsweringHTTP, keys_sent

from grpo_math.system.http import Client, ServerError, reachable


@pytest.fixture
def server():
    server = AnsweringHTTP()
    server.answers["/x"] = server.answers["http://judge.invalid/x"] = '{"fine": true}'
    yield server
    server.stop()


def proxied(monkeypatch, url):
    """Make ``url`` the proxy of the environment."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name.lower(), "" if name == "NO_PROXY" else url)


def test_a_server_on_this_machine_is_asked_without_proxy_and_with_the_hub_offline(server, monkeypatch):
    proxied(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert Client(f"http://localhost:{server.port}", timeout=5).ask("/x") == {"fine": True}


def test_another_machine_is_asked_through_the_proxy_if_the_client_may(server, monkeypatch):
    proxied(monkeypatch, server.url)
    assert Client("http://judge.invalid", timeout=5).ask("/x") == {"fine": True}
    assert keys_sent(server) == [("http://judge.invalid/x", None)]
    with pytest.raises(ServerError, match=r"does not answer \(\[Errno"):
        Client("http://judge.invalid", timeout=5, proxies=False).ask("/x")


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "URL requires a key: set VLLM_API_KEY to the server's"), (400, "URL/x answers 400: no: ***")],
)
def test_the_key_is_sent_and_is_in_no_log_and_no_error_even_if_the_server_repeats_it(status, message, server, caplog):
    caplog.set_level(logging.DEBUG)
    server.queue = [(status, "no: secret-key-of-mine")]
    with pytest.raises(ServerError) as error:
        Client(server.url, timeout=5, key="secret-key-of-mine").ask("/x", {})
    assert keys_sent(server) == [("/x", "Bearer secret-key-of-mine")]
    assert (str(error.value), error.value.status) == (message.replace("URL", server.url), status)
    assert "POST" in caplog.text
    assert "secret" not in caplog.text


def test_a_busy_server_is_asked_again_and_a_refusal_is_not(server, monkeypatch):
    pauses = []
    monkeypatch.setattr("time.sleep", pauses.append)
    server.queue = [(503, ""), (500, ""), (429, "")]
    assert Client(server.url, timeout=5, retries=3).ask("/x") == {"fine": True}
    assert pauses == [0.5, 1.0, 2.0]
    for status, retries in ((400, None), (503, 0), (503, 1)):
        server.queue = 2 * [(status, "no")]
        with pytest.raises(ServerError, match=f"answers {status}: no"):
            Client(server.url, timeout=5, retries=3).ask("/x", retries=retries)
    assert len(server.asked) == 4 + 1 + 1 + 2


@pytest.mark.parametrize("text", ["[" * 100_000, "Success", ""])
def test_an_answer_that_is_not_json_is_its_text(text, server):
    server.queue = [(200, text)]
    assert Client(server.url, timeout=5).ask("/x") == text


def test_any_answer_means_that_a_server_can_be_reached(server):
    server.queue = [(200, ""), (404, "")]
    assert reachable(server.url, 5) is reachable(server.url, 5) is True
    assert not reachable("http://127.0.0.1:9", 5)
    assert not reachable("no address", 5)
