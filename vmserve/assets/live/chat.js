// The chat box: one conversation with /v1/chat/completions. It lives in this page's memory alone,
// and whatever the model or the server says is shown as text.

import { at, count, seconds, show } from "./text.js";

const chat = { messages: [], answering: null };

function element(kind, name, text = "") {
  const made = document.createElement(kind);
  made.className = name;
  made.textContent = text;
  return made;
}

// -- the stream ------------------------------------------------------------------------------

async function* chunksOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

let chosen = null;

/** Send what is said from now on to the model of this name. */
export function chatWith(name) {
  chosen = name;
}

function bodyOf(messages) {
  const system = at("chat-system").value.trim();
  const body = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (chosen !== null) body.model = chosen;
  if (at("chat-temperature").value) body.temperature = Number(at("chat-temperature").value);
  if (at("chat-tokens").value) body.max_tokens = Number(at("chat-tokens").value);
  return JSON.stringify(body);
}

async function ask(messages, key, signal) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const body = bodyOf(messages);
  const response = await fetch("v1/chat/completions", { method: "POST", headers, body, signal });
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  const error = new Error(told.error ? told.error.message : `HTTP ${response.status}`);
  error.status = response.status;
  throw error;
}

// -- one answer ------------------------------------------------------------------------------

class Answer {
  constructor() {
    this.began = performance.now();
    this.first = null;
    this.tokens = 0;
    this.text = "";
    this.regime = "";
    this.id = null;
    this.reason = null;
    this.box = element("article", "answer busy");
    this.content = element("p", "text");
    this.box.append(this.content);
    this.thoughts = null;
  }

  take(chunk) {
    this.id ??= chunk.id;
    if (chunk.usage) this.tokens = chunk.usage.completion_tokens;
    for (const { delta, finish_reason: reason } of chunk.choices) {
      const thought = delta.reasoning_content ?? delta.reasoning;
      if (thought) this.think(thought);
      if (delta.content) {
        this.text += delta.content;
        append(this.content, delta.content);
      }
      if (thought || delta.content) this.first ??= performance.now();
      this.reason = reason ?? this.reason;
    }
  }

  think(text) {
    if (!this.thoughts) {
      const folded = document.createElement("details");
      this.thoughts = element("p", "text quiet");
      folded.append(element("summary", "", "Thoughts"), this.thoughts);
      this.box.prepend(folded);
    }
    append(this.thoughts, text);
  }

  end(failure) {
    this.box.classList.remove("busy");
    const stopped = failure && failure.name === "AbortError";
    if (failure && !stopped) {
      const told = failure.name === "TypeError" ? "no answer from the server" : failure.message;
      const line = element("p", "text failed", told);
      line.setAttribute("role", "alert");
      this.box.append(line);
      return;
    }
    const spent = (performance.now() - (this.first ?? this.began)) / 1000;
    const notes = [];
    if (this.first) notes.push(`first token ${seconds((this.first - this.began) / 1000)}`);
    if (this.tokens) notes.unshift(`${count(this.tokens)} tokens`);
    if (this.tokens > 1 && spent > 0) notes.push(`${count((this.tokens - 1) / spent)} tokens/s`);
    if (stopped) notes.push("stopped");
    if (this.reason === "length") notes.push("cut at the most tokens");
    else if (this.reason && this.reason !== "stop") notes.push(`ended by ${this.reason}`);
    this.meta = element("p", "meta quiet", notes.join(" · "));
    this.box.append(this.meta);
    this.showRegime();
  }

  showRegime() {
    if (!this.meta || !this.regime || this.meta.querySelector("b")) return;
    this.meta.append(" · ", element("b", this.regime, this.regime));
  }
}

/** Adds to the one text node of `parent`. */
function append(parent, text) {
  if (parent.firstChild) parent.firstChild.appendData(text);
  else parent.append(text);
}

// -- the conversation ------------------------------------------------------------------------

async function converse(text, { key, refused, asked }) {
  const question = { role: "user", content: text };
  const asking = element("article", "question");
  asking.append(element("p", "text", text));
  const answer = new Answer();
  const stop = new AbortController();
  chat.answering = { answer, stop };
  put(asking, answer.box);
  showBusy(true);
  let failure = null;
  try {
    const response = await ask([...chat.messages, question], key(), stop.signal);
    for await (const chunk of chunksOf(response)) {
      const isFirst = answer.id === null;
      answer.take(chunk);
      if (isFirst) asked();
      follow();
    }
  } catch (error) {
    failure = error;
  }
  if (chat.answering?.answer !== answer) return; // cleared meanwhile
  chat.answering = null;
  answer.end(failure);
  if (failure && failure.name !== "AbortError") {
    // A question that failed is no part of the conversation; it can be sent again.
    if (!at("chat-text").value) at("chat-text").value = text;
    if (failure.status === 401) refused("This key is not accepted.");
  } else if (answer.text) {
    chat.messages.push(question, { role: "assistant", content: answer.text });
  }
  chat.last = answer;
  showBusy(false);
  follow();
}

function put(...boxes) {
  at("chat-empty").hidden = true;
  at("chat-clear").disabled = false;
  at("chat-log").append(...boxes);
  const log = at("chat-log");
  log.scrollTop = log.scrollHeight;
}

/** Keeps the end in sight, unless somebody has scrolled away from it. */
function follow() {
  const log = at("chat-log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
}

function showBusy(busy) {
  at("chat-log").setAttribute("aria-busy", String(busy));
  at("chat-send").classList.toggle("stop", busy);
  show("chat-send", busy ? "Stop" : "Send");
}

function clear() {
  chat.answering?.stop.abort();
  Object.assign(chat, { messages: [], answering: null, last: null });
  for (const box of [...at("chat-log").querySelectorAll("article")]) box.remove();
  at("chat-empty").hidden = false;
  at("chat-clear").disabled = true;
  showBusy(false);
  at("chat-text").focus();
}

/** `requests`: those of the live figures; they say in which regime the answer is computed. */
export function seeRequests(requests) {
  const answer = chat.answering?.answer ?? chat.last;
  if (!answer?.id) return;
  const mine = requests.find((request) => request.request_id.startsWith(answer.id));
  if (mine?.regime) answer.regime = mine.regime;
  answer.showRegime();
}

/** `key()`: the API key or null; `refused(text)`: asks for another; `asked()`: an answer began. */
export function startChat(page) {
  const form = at("chat-form");
  const field = at("chat-text");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = field.value.trim();
    if (chat.answering || !text) return;
    field.value = "";
    converse(text, page);
  });
  at("chat-send").addEventListener("click", (event) => {
    if (!chat.answering) return;
    event.preventDefault();
    chat.answering.stop.abort();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") chat.answering?.stop.abort();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!chat.answering) form.requestSubmit();
  });
  at("chat-empty").addEventListener("click", (event) => {
    if (event.target.tagName === "BUTTON" && !chat.answering) converse(event.target.textContent, page);
  });
  at("chat-clear").addEventListener("click", clear);
}
