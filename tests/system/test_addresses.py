"""One module makes and judges addresses: a key, a proxy and the start of a server depend on them."""

import pytest

from grpo_math.errors import ConfigError
from grpo_math.generation import vllm_server
from grpo_math.planner.devices import Layout
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.addresses import is_address, server_url
from grpo_math.system.http import Client
from grpo_math.train.serve import server_start

SERVED = {"use_vllm": True, "vllm_mode": "server", "use_peft": True}


@pytest.mark.parametrize(
    ("host", "url", "needs_key", "is_here"),
    [
        ("127.0.0.1", "http://127.0.0.1:80", False, True),
        ("localhost", "http://localhost:80", False, True),
        ("::1", "http://[::1]:80", False, True),
        ("0.0.0.0", "http://127.0.0.1:80", True, True),
        ("::", "http://[::1]:80", True, True),
        ("10.0.0.0", "http://10.0.0.0:80", True, False),
        ("node1", "http://node1:80", True, False),
        ("fe80::1%eth0", "http://[fe80::1%eth0]:80", True, False),
    ],
)
def test_a_host_is_judged_alike_everywhere(host, url, needs_key, is_here, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    assert server_url(host, 80) == url
    assert is_address(url)
    settings = RunSettings({**SERVED, "vllm_server_host": host, "model_name_or_path": "m"})
    assert settings.starts_server == is_here
    assert settings.external_server == ("" if is_here else host)
    # The launcher reaches a server that it has started itself at the address of the host.
    if needs_key:
        with pytest.raises(ConfigError, match=r"host=.* lets other machines use the server"):
            vllm_server.ServerSettings(model="m", host=host).command()
        monkeypatch.setenv("VLLM_API_KEY", "abc")
    layout = Layout("server", 0, 1, 1, "")
    monkeypatch.setenv("GRPO_MATH_VLLM", "sh")  # any program
    command, _, reached = server_start(settings, layout, [], 80, host)
    assert (command[command.index("--host") + 1], reached) == (host, url)
    for address in (url, url.replace("http:", "https:").removesuffix(":80") + "/v1"):
        client = Client(address, timeout=1)
        assert client._http.trust_env != is_here
