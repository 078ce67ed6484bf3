// Shows a model's Markdown. Every node is made by hand and holds text, so nothing in it can run.

function node(tag, text = "", name = "") {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  if (name) made.className = name;
  return made;
}

const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/g;

function inline(parent, text) {
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, code, strong, weak, label, link] = found;
    parent.append(text.slice(end, found.index));
    end = found.index + whole.length;
    if (code !== undefined) parent.append(node("code", code));
    else if (strong !== undefined) parent.append(node("strong", strong));
    else if (weak !== undefined) parent.append(node("em", weak));
    else {
      const anchor = node("a", label);
      anchor.href = link;
      anchor.rel = "noopener noreferrer";
      anchor.target = "_blank";
      parent.append(anchor);
    }
  }
  parent.append(text.slice(end));
}

const FENCE = /^\s*```/;
const ITEM = /^\s*(?:[-*+]|\d+[.)])\s+/;
const KINDS = [[/^#{1,6}\s/, "heading"], [ITEM, "list"], [/^>\s?/, "quote"]];

function kindOf(line) {
  return KINDS.find(([pattern]) => pattern.test(line))?.[1] ?? "paragraph";
}

// The blocks of a text: {kind, lines}. A fence that is still open goes to the end.
function blocksOf(text) {
  const blocks = [];
  let open = null;
  for (const line of text.split("\n")) {
    if (open?.kind === "code") {
      if (FENCE.test(line)) open = null;
      else open.lines.push(line);
    } else if (FENCE.test(line)) {
      blocks.push((open = { kind: "code", lines: [] }));
    } else if (!line.trim()) {
      open = null;
    } else {
      const kind = kindOf(line);
      const goesOn = open && (open.kind === kind ? kind !== "heading" : open.kind === "list" && kind === "paragraph");
      if (!goesOn) blocks.push((open = { kind, lines: [] }));
      open.lines.push(line);
    }
  }
  return blocks;
}

function shown({ kind, lines }) {
  if (kind === "code") {
    const pre = node("pre");
    pre.append(node("code", lines.join("\n")));
    return pre;
  }
  if (kind === "list") {
    const list = node(/^\s*\d/.test(lines[0]) ? "ol" : "ul");
    for (const line of lines) {
      if (ITEM.test(line)) list.append(node("li"));
      inline(list.lastChild, line.replace(ITEM, "") + "\n");
    }
    return list;
  }
  const tag = { heading: "h4", quote: "blockquote", paragraph: "p" }[kind];
  const made = node(tag);
  inline(made, lines.map((line) => line.replace(/^(?:#{1,6}\s|>\s?)/, "")).join("\n"));
  return made;
}

// A text that grows: blocks that have not changed keep their nodes.
class TextView {
  constructor(parent) {
    this.parent = parent;
    this.sources = [];
  }

  set(text) {
    const blocks = blocksOf(text);
    const sources = blocks.map((block) => `${block.kind}\n${block.lines.join("\n")}`);
    let same = 0;
    while (same < sources.length && sources[same] === this.sources[same]) same++;
    while (this.parent.childNodes.length > same) this.parent.lastChild.remove();
    this.parent.append(...blocks.slice(same).map(shown));
    this.sources = sources;
  }
}
