// The conversation: sends messages, shows answers as they come, and what went wrong.

const SAMPLING = ["temperature", "top_p", "max_tokens", "seed"];
const SAVE_MS = 1000;
const find = (id) => document.getElementById(id);

class RequestError extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered with status ${status}`);
    this.status = status;
  }
}

function headers() {
  return store.key ? { Authorization: `Bearer ${store.key}` } : {};
}

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new RequestError(response.status, body?.error);
}

async function ask(path) {
  return (await checked(await fetch(path, { headers: headers() }))).json();
}

// The data of server-sent events, until [DONE].
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part === "data: [DONE]") return;
        if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function body(chat) {
  const said = chat.messages.filter((message) => message.content).map(({ role, content }) => ({ role, content }));
  const { system } = store.settings;
  const made = { messages: system ? [{ role: "system", content: system }, ...said] : said };
  for (const name of SAMPLING) {
    if (store.settings[name] !== "") made[name] = Number(store.settings[name]);
  }
  return { ...made, model: model.id, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
}

function explained(error) {
  if (error instanceof RequestError) return error.message;
  if (error.name === "TypeError") return "The server cannot be reached, or it ended. Start it again, then try once more.";
  return String(error.message ?? error);
}

class Conversation {
  constructor() {
    this.chat = store.chats[0] ?? store.newChat();
    this.views = [];
    this.stopping = null;
  }

  get isBusy() {
    return this.stopping !== null;
  }

  open(chat) {
    this.stop();
    this.chat = chat;
    this.show();
    find("prompt").focus();
  }

  show() {
    find("log").replaceChildren();
    this.views = [];
    for (const message of this.chat.messages) this.add(message);
    if (!this.chat.messages.length) find("log").append(node("p", "Ask something, or add a text file and ask about it."));
    showList();
    showBusy();
    scrollDown(true);
  }

  send(text) {
    if (!this.chat.messages.length) {
      this.chat.title = text.slice(0, 80);
      find("log").replaceChildren();
    }
    this.add(this.push({ role: "user", content: text }));
    showList();
    return this.answer();
  }

  push(message) {
    this.chat.messages.push(message);
    return message;
  }

  // Go back to before message `index`, and on from there with `text`, if that is given.
  again(index, text) {
    this.stop();
    this.chat.messages.length = index;
    this.show();
    return text === undefined ? this.answer() : this.send(text);
  }

  stop() {
    this.stopping?.abort();
    this.stopping = null;
  }

  async answer() {
    const { chat } = this;
    const request = body(chat), stopping = (this.stopping = new AbortController());
    const message = this.push({ role: "assistant", content: "" }), view = this.add(message);
    const start = performance.now();
    let first = 0, saved = 0, drawn = false;
    const draw = () => {
      if (!drawn) requestAnimationFrame(() => ((drawn = false), view.update(), scrollDown()));
      drawn = true;
    };
    showBusy();
    scrollDown(true);
    memory.wake();
    try {
      const sent = { "Content-Type": "application/json", ...headers() };
      const response = await fetch("/v1/chat/completions", { method: "POST", headers: sent, body: JSON.stringify(request), signal: stopping.signal });
      for await (const event of eventsOf(await checked(response))) {
        if (event.error) throw new RequestError(500, event.error);
        const [choice] = event.choices, now = performance.now();
        message.content += choice?.delta?.content ?? "";
        if (choice?.delta?.reasoning_content) message.reasoning = (message.reasoning ?? "") + choice.delta.reasoning_content;
        first ||= choice?.delta?.content || choice?.delta?.reasoning_content ? now : 0;
        if (choice?.finish_reason) message.end = choice.finish_reason;
        if (event.usage) message.note = speedOf(event.usage, first - start, now - first);
        draw();
        if (now - saved > SAVE_MS) {
          saved = now;
          store.save();
        }
      }
      if (!message.end) throw new Error("The server ended the answer early. Try once more.");
    } catch (error) {
      if (stopping.signal.aborted) message.end = "stopped";
      else message.error = explained(error);
      if (error.status === 401) openSettings("key");
    }
    if (this.stopping === stopping) this.stopping = null;
    store.save();
    draw();
    showBusy();
    memory.wake();
  }

  add(message) {
    const view = new MessageView(message, this.chat, this);
    this.views.push(view);
    find("log").append(view.root);
    return view;
  }
}

function speedOf(usage, waitedMs, decodedMs) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const parts = [`${number(usage.prompt_tokens)} tokens in${cached ? ` (${number(cached)} from the cache)` : ""}, ${number(usage.completion_tokens)} out`];
  if (waitedMs > 0) parts.push(`first after ${(waitedMs / 1000).toFixed(1)} s`);
  if (usage.completion_tokens > 1 && decodedMs > 0) parts.push(`${((1000 * (usage.completion_tokens - 1)) / decodedMs).toFixed(1)} tok/s`);
  return parts.join(", ");
}

const ENDS = { length: "cut: most tokens reached", stopped: "stopped" };

class MessageView {
  constructor(message, chat, conversation) {
    this.message = message;
    this.chat = chat;
    this.conversation = conversation;
    this.root = node("article", "", `message ${message.role}`);
    this.thinking = node("details");
    this.text = node("div", "", "text");
    this.footer = node("footer");
    this.root.append(node("h3", message.role === "user" ? "You" : "Model"), this.thinking, this.text, this.footer);
    this.view = new TextView(this.text);
    this.update();
  }

  update() {
    const { message } = this;
    this.root.querySelector(".error")?.remove();
    this.thinking.hidden = !message.reasoning;
    if (message.reasoning) this.thinking.replaceChildren(node("summary", "Thinking"), message.reasoning);
    if (message.role === "user") {
      this.text.textContent = message.content;
      this.text.classList.toggle("long", message.content.length > 2000);
    } else this.view.set(message.content);
    if (message.error) {
      const told = node("p", message.error, "error");
      told.setAttribute("role", "alert");
      this.footer.before(told);
    }
    const isOpen = message.role === "assistant" && !message.end && !message.error && this.conversation.isBusy;
    const notes = [message.note, ENDS[message.end]].filter(Boolean).join(" · ");
    this.footer.replaceChildren(notes, ...(isOpen ? [] : this.buttons()));
  }

  buttons() {
    const index = this.chat.messages.indexOf(this.message);
    const copy = () => navigator.clipboard?.writeText(this.message.content);
    const made = this.message.content ? [button("Copy", copy)] : [];
    if (this.message.role === "user") made.push(button("Edit", () => this.edit(index)));
    else if (index === this.chat.messages.length - 1) {
      made.push(button(this.message.error ? "Try again" : "Regenerate", () => this.conversation.again(index)));
    }
    return made;
  }

  edit(index) {
    const area = node("textarea");
    area.value = this.message.content;
    area.setAttribute("aria-label", "Edit the message");
    this.text.replaceChildren(area);
    const send = () => area.value.trim() && this.conversation.again(index, area.value);
    area.addEventListener("keydown", (event) => isSend(event) && (event.preventDefault(), send()));
    this.footer.replaceChildren(button("Send", send), button("Cancel", () => this.update()));
    area.focus();
  }
}

function button(text, action) {
  const made = node("button", text);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}

function isSend(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

let follows = true;

function scrollDown(always = false) {
  const log = find("log");
  if (always) follows = true;
  if (follows) log.scrollTop = log.scrollHeight;
}

function showList() {
  find("chat-list").replaceChildren(...store.chats.map((chat) => {
    const item = node("li"), title = button(chat.title || "New chat", () => conversation.open(chat));
    title.className = "title";
    item.setAttribute("aria-current", String(chat === conversation.chat));
    const remove = button("✕", () => {
      store.remove(chat.id);
      if (chat === conversation.chat) conversation.open(store.chats[0] ?? store.newChat());
      else showList();
    });
    remove.setAttribute("aria-label", `Delete ${chat.title || "New chat"}`);
    item.append(title, remove);
    return item;
  }));
}

function showBusy() {
  find("stop").hidden = !conversation.isBusy;
  find("send").hidden = conversation.isBusy;
  for (const view of conversation.views) view.update();
}

function showTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = store.settings.theme || dark;
  memory.wake();
}

function openSettings(focus) {
  for (const name of Object.keys(DEFAULTS)) find(name).value = store.settings[name];
  find("key").value = store.key;
  if (!find("settings").open) find("settings").showModal();
  if (focus) find(focus).focus();
}

function keepSettings() {
  for (const name of Object.keys(DEFAULTS)) store.settings[name] = find(name).value;
  if (find("key").value !== store.key) {
    store.key = find("key").value;
    connect();
  }
  store.save();
  showTheme();
}

const store = new Store((text) => (find("notice").textContent = text));
let model = { id: "", max_model_len: 0 };
const memory = new MemoryView(find("memory"), ask);
const conversation = new Conversation();

async function connect() {
  try {
    [model] = (await ask("/v1/models")).data;
    find("model").textContent = model.id;
    find("room").textContent = `up to ${number(model.max_model_len)} tokens`;
    find("notice").textContent = "";
    document.title = `${model.id} · nanoengine`;
  } catch (error) {
    find("notice").textContent = explained(error);
    if (error.status === 401) openSettings("key");
  }
}

function begin() {
  const prompt = find("prompt");
  const submit = () => {
    const text = prompt.value;
    if (!text.trim() || conversation.isBusy) return;
    prompt.value = "";
    conversation.send(text);
  };
  find("ask").addEventListener("submit", (event) => (event.preventDefault(), submit()));
  prompt.addEventListener("keydown", (event) => isSend(event) && (event.preventDefault(), submit()));
  document.addEventListener("keydown", (event) => event.key === "Escape" && conversation.stop());
  find("stop").addEventListener("click", () => conversation.stop());
  find("new-chat").addEventListener("click", () => conversation.open(store.newChat()));
  find("log").addEventListener("scroll", ({ target }) => {
    follows = target.scrollHeight - target.scrollTop - target.clientHeight < 60;
  });
  find("attach").addEventListener("click", () => find("file").click());
  find("file").addEventListener("change", async ({ target }) => {
    for (const file of target.files) prompt.value += `${file.name}:\n\n${await file.text()}\n\n`;
    target.value = "";
    prompt.focus();
  });
  for (const name of ["chats", "memory"]) {
    const drawer = find(name), toggle = find(`toggle-${name}`);
    const set = (isClosed) => {
      drawer.classList.toggle("closed", isClosed);
      toggle.setAttribute("aria-expanded", String(!isClosed));
      memory.wake();
    };
    set(innerWidth <= 900);
    toggle.addEventListener("click", () => set(!drawer.classList.contains("closed")));
    find("log").addEventListener("click", () => innerWidth <= 900 && set(true));
  }
  find("open-settings").addEventListener("click", () => openSettings());
  find("settings").addEventListener("close", keepSettings);
  find("forget").addEventListener("click", () => {
    store.chats = [];
    conversation.open(store.newChat());
    store.save();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
  window.addEventListener("pagehide", () => store.save());
  showTheme();
  conversation.show();
  connect();
}

begin();
