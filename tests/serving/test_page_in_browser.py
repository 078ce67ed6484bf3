"""The chat page in headless Chromium (`make page`). Each test leaves a picture in build/page/."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver import host_gib
from live_server import LiveServer, live_server, until
from safetensors.torch import load_file, save_file
from tiny_model import SPECIAL_TOKENS, TinyModel

webdriver = pytest.importorskip("selenium.webdriver")

from selenium.common.exceptions import StaleElementReferenceException  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

pytestmark = pytest.mark.browser
PICTURES = Path(__file__).parents[2] / "build" / "page"
# Chromium must not look for anything outside of this machine.
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
SETTINGS = {"temperature": "0", "max_tokens": "40"}
WIDE, NARROW = (1280, 800), (400, 800)
CONTEXT = 16384


@pytest.fixture(scope="module")
def long_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of many positions that never ends by itself: no end is ever the likeliest."""
    folder = tmp_path_factory.mktemp("long")
    TinyModel(settings={"max_position_embeddings": CONTEXT})(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][: len(SPECIAL_TOKENS)] = 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def server(long_tiny: Path) -> Iterator[LiveServer]:
    """30 blocks of 16 tokens on the device: longer requests stream."""
    gib = host_gib(long_tiny, 1400, 16)
    settings = {"num_gpu_blocks": 30, "kvcache_block_size": 16, "kv_offload_gib": gib}
    with live_server(long_tiny, settings | {"offload_mode": "stream"}) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))
    driver.set_script_timeout(30)
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """The page in a browser, as a person uses it."""

    def __init__(self, browser: Any, server: LiveServer, size: tuple[int, int] = WIDE) -> None:
        self.browser = browser
        self.address = f"http://127.0.0.1:{server.port}/"
        browser.set_window_size(*size)
        browser.get(self.address)
        browser.execute_script(
            "store.save = () => {}; localStorage.clear(); sessionStorage.clear()"
        )
        self.keep("settings", SETTINGS)
        self.load()

    def load(self) -> None:
        self.browser.get(self.address)
        self.browser.get_log("browser")

    def keep(self, name: str, value: Any) -> None:
        """What an earlier visit left; it holds from the next load on."""
        self.browser.execute_script(
            "store.save = () => {}; localStorage.setItem(arguments[0], arguments[1])",
            f"nanoengine.{name}",
            json.dumps(value),
        )

    def find(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """What is seen of all elements."""
        try:
            found = self.browser.find_elements(By.CSS_SELECTOR, selector)
            return [each.text for each in found]
        except StaleElementReferenceException:  # the page changed meanwhile
            return self.texts(selector)

    def click(self, name: str) -> None:
        """The last button that is seen with this name."""
        buttons = self.browser.find_elements(By.TAG_NAME, "button")
        [each for each in buttons if each.is_displayed() and each.text == name][-1].click()

    def send(self, text: str) -> None:
        prompt = self.find("#prompt")
        self.browser.execute_script("arguments[0].value = arguments[1]", prompt, text)
        prompt.send_keys(Keys.ENTER)

    def wait_for_end(self) -> None:
        until(lambda: self.find("#send").is_displayed())

    def ask(self, text: str) -> None:
        self.send(text)
        self.wait_for_end()

    @property
    def answers(self) -> list[str]:
        return [m["content"] for m in self.messages if m["role"] == "assistant"]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Of the open conversation, as the page holds them."""
        found: list[dict[str, Any]] = self.browser.execute_script(
            "return conversation.chat.messages"
        )
        return found

    def picture(self, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.browser.save_screenshot(str(PICTURES / f"{name}.png"))

    def assert_quiet(self) -> None:
        """The browser complained of nothing."""
        assert [e for e in self.browser.get_log("browser") if e["level"] == "SEVERE"] == []


def answer_of(server: LiveServer, *texts: str, max_tokens: int = 40) -> str:
    """What the server answers to a conversation, whole. texts: user, assistant, user, ..."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    body = {"messages": messages, "temperature": 0, "max_tokens": max_tokens}
    status, answer = server.post("/v1/chat/completions", **body)
    assert status == 200, answer
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_a_chat(browser: Any, server: LiveServer) -> None:
    """The answer is the server's, and the second one is to both turns."""
    page = Page(browser, server)
    page.ask("hello")
    first = answer_of(server, "hello")
    assert page.answers == [first]
    page.ask("again")
    assert page.answers == [first, answer_of(server, "hello", first, "again")]
    assert "40 out" in page.texts("footer")[-1] and "cut: most tokens" in page.texts("footer")[-1]
    assert page.texts("#chat-list .title") == ["hello"]
    page.picture("chat")
    page.assert_quiet()


def test_regenerate_and_edit(browser: Any, server: LiveServer) -> None:
    page = Page(browser, server)
    page.ask("one")
    page.click("Regenerate")
    page.wait_for_end()
    assert page.answers == [answer_of(server, "one")] and len(page.messages) == 2
    page.click("Edit")
    area = page.find("article textarea")
    assert area.get_attribute("value") == "one"
    area.send_keys(" two", Keys.ENTER)
    page.wait_for_end()
    assert [m["content"] for m in page.messages] == ["one two", answer_of(server, "one two")]
    page.assert_quiet()


def test_stop_ends_the_request(browser: Any, server: LiveServer) -> None:
    page = Page(browser, server)
    page.keep("settings", SETTINGS | {"max_tokens": ""})
    page.load()
    page.send("count")
    until(lambda: page.answers and len(page.answers[0]) > 20)
    page.picture("streaming")
    page.find("#prompt").send_keys(Keys.ESCAPE)
    page.wait_for_end()
    server.wait_until_idle()
    until(lambda: "stopped" in page.texts("footer")[-1])
    text = page.answers[0]
    assert answer_of(server, "count", max_tokens=400).startswith(text[:20])
    page.picture("stopped")
    page.load()
    assert page.answers == [text]
    page.assert_quiet()


def test_an_error_can_be_read_and_tried_again(browser: Any, server: LiveServer) -> None:
    page = Page(browser, server)
    page.ask("x" * (CONTEXT + 1))
    (told,) = page.texts(".error")
    assert str(CONTEXT) in told and "shorten the prompt" in told
    page.picture("error")
    page.click("Try again")
    until(lambda: len(page.texts(".error")) == 1 and page.find("#send").is_displayed())
    page.ask("short")
    assert page.texts(".error")  # the conversation is still too long, and says so
    page.click("New chat")
    page.ask("short")
    assert page.answers == [answer_of(server, "short")]


def test_a_server_that_is_gone(browser: Any, long_tiny: Path) -> None:
    with live_server(long_tiny) as server:
        page = Page(browser, server)
        page.ask("hello")
    page.ask("more")
    assert "cannot be reached" in page.texts(".error")[0]
    page.picture("gone")


def test_a_reload_keeps_conversations(browser: Any, server: LiveServer) -> None:
    page = Page(browser, server)
    page.ask("first")
    page.click("New chat")
    page.ask("second")
    page.load()
    assert page.texts("#chat-list .title") == ["second", "first"]
    assert page.texts("article .text")[0] == "second"
    page.find("#chat-list li:nth-child(2) .title").click()
    assert page.answers == [answer_of(server, "first")]
    page.find("[aria-label='Delete first']").click()
    page.load()
    assert page.texts("#chat-list .title") == ["second"]
    assert page.texts("article .text")[0] == "second"
    page.picture("reload")
    page.assert_quiet()


def test_text_is_never_markup(browser: Any, server: LiveServer) -> None:
    evil = (
        "<img src=x onerror='hit=1'><script>hit=1</script>\n\n[a](javascript:hit=1) "
        '[b](https://example.org/"onclick=hit=1) **bold** *weak* `<b>code</b>`\n\n'
        "```html\n<script>hit=1</script>\n\nstill code\n```\n\n# Title\n- one\n- two\n"
        "1. three\n> said"
    )
    page = Page(browser, server)
    said = [
        {"role": "user", "content": evil},
        {"role": "assistant", "content": evil, "end": "stop"},
    ]
    page.keep("chats", [{"id": "1", "title": evil, "messages": said}])
    page.load()
    assert browser.execute_script("return window.hit === undefined")
    assert not browser.find_elements(By.CSS_SELECTOR, "main img, main script, article b")
    assert [a.get_attribute("href")[:8] for a in browser.find_elements(By.TAG_NAME, "a")] == [
        "https://"
    ]
    answer = ".assistant .text"
    assert page.texts(f"{answer} pre") == ["<script>hit=1</script>\n\nstill code"]
    assert page.texts(f"{answer} strong") == ["bold"] and page.texts(f"{answer} em") == ["weak"]
    assert page.texts(f"{answer} p code") == ["<b>code</b>"]
    assert page.texts(f"{answer} li") == ["one", "two", "three"]
    assert page.texts(f"{answer} h4") == ["Title"] and page.texts(f"{answer} blockquote") == [
        "said"
    ]
    assert page.texts(".user .text") == [evil]
    page.picture("markup")
    page.assert_quiet()


def test_a_narrow_dark_screen(browser: Any, server: LiveServer) -> None:
    page = Page(browser, server, NARROW)
    page.keep("settings", SETTINGS | {"theme": "dark"})
    page.load()
    page.ask("hello")
    sizes = browser.execute_script(
        "return [document.documentElement.scrollWidth, innerWidth, "
        "find('send').getBoundingClientRect().right]"
    )
    assert sizes[0] <= sizes[1] and sizes[2] <= sizes[1]
    assert not page.find("#chats").is_displayed() and not page.find("#memory").is_displayed()
    page.picture("narrow")
    page.click("☰")
    assert page.find("#chats").is_displayed()
    page.picture("narrow-list")
    assert browser.execute_script("return getComputedStyle(document.body).colorScheme") == "dark"
    page.assert_quiet()


def test_keys_alone_do_everything(browser: Any, server: LiveServer) -> None:
    """Tab reaches each control in the order of the page."""
    page = Page(browser, server)
    page.ask("hello")
    seen = []
    for _ in range(14):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        seen.append(browser.switch_to.active_element.text)
    order = [s for s in seen if s in ("New chat", "Settings", "Memory", "Edit", "Regenerate")]
    assert set(order) == {"New chat", "Settings", "Memory", "Edit", "Regenerate"}


def test_the_key_is_asked_for(browser: Any, long_tiny: Path) -> None:
    with live_server(long_tiny, api_key="secret") as server:
        page = Page(browser, server)
        until(lambda: page.find("#settings").is_displayed())
        page.picture("key")
        page.find("#key").send_keys("secret")
        page.click("Close")
        until(lambda: page.texts("#model") == ["tiny"])
        page.ask("hello")
        assert page.answers and not page.texts(".error")


def test_ten_thousand_tokens_beyond_the_device(browser: Any, server: LiveServer) -> None:
    """The page keeps up with a long answer, and shows that its KV has left the device."""
    page = Page(browser, server)
    page.keep("settings", SETTINGS | {"max_tokens": "10000"})
    page.load()
    page.send("go on")
    until(lambda: any("on the host" in each for each in strips(browser)))
    assert any("streams each step" in each for each in page.texts("#requests figcaption"))
    page.picture("beyond-the-device")
    deadline, waits = time.monotonic() + 800, []
    while not page.find("#send").is_displayed():
        begin = time.monotonic()
        browser.execute_script("return 1")
        waits.append(time.monotonic() - begin)
        assert time.monotonic() < deadline
        time.sleep(1)
    # Half of them, and never long: other programs may take the cores for a second.
    assert statistics.median(waits) < 1.0 and max(waits) < 5.0, "the page does not answer"
    assert page.messages[-1]["end"] == "length" and "10,000 out" in page.texts("footer")[-1]
    page.picture("ten-thousand")
    server.wait_until_idle()
    page.assert_quiet()


def strips(browser: Any) -> list[str]:
    """What the pictures of the requests' blocks say to who cannot see them."""
    try:
        found = browser.find_elements(By.CSS_SELECTOR, "#requests canvas")
        return [each.get_attribute("aria-label") for each in found]
    except StaleElementReferenceException:
        return []
