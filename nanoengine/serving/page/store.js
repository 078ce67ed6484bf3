"use strict";
// What this browser keeps: conversations and settings. Nothing of it is sent but as a request.

const DEFAULTS = { system: "", temperature: "", top_p: "", max_tokens: "", seed: "", theme: "" };

class Store {
  // onFull: called with a sentence when the browser keeps nothing more.
  constructor(onFull) {
    this.onFull = onFull;
    this.settings = { ...DEFAULTS, ...this.read("settings", {}) };
    const chats = this.read("chats", []);
    this.chats = Array.isArray(chats) ? chats.filter((chat) => Array.isArray(chat?.messages)) : [];
  }

  read(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(`nanoengine.${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  }

  save() {
    try {
      localStorage.setItem("nanoengine.settings", JSON.stringify(this.settings));
      localStorage.setItem("nanoengine.chats", JSON.stringify(this.chats));
    } catch {
      this.onFull("This browser keeps no more text: what is new is lost when the page closes. Delete a conversation.");
    }
  }

  // A new conversation, or the newest one if it is still empty.
  newChat() {
    if (!this.chats.length || this.chats[0].messages.length) {
      this.chats.unshift({ id: crypto.randomUUID?.() ?? String(Math.random()), messages: [] });
    }
    return this.chats[0];
  }

  remove(id) {
    this.chats = this.chats.filter((chat) => chat.id !== id);
    this.save();
  }

  // The key lives as long as the tab.
  get key() {
    return sessionStorage.getItem("nanoengine.key") ?? "";
  }

  set key(key) {
    sessionStorage.setItem("nanoengine.key", key);
  }
}
