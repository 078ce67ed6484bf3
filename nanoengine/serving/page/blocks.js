// Shows where the KV blocks of each request lie: what GET /kv_blocks says, about once a second.

const PLACES = {
  device: "on the device",
  both: "on the device, the host has a copy",
  moving: "on the way to the host",
  host: "on the host",
  cached: "cached for later requests",
  empty: "free, or reserved",
};
const BUSY_MS = 700, IDLE_MS = 4000;

const number = (value) => Math.round(value).toLocaleString("en");
const speed = (bytes) => (bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB/s` : `${(bytes / 1e9).toFixed(1)} GB/s`);
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

class MemoryView {
  // ask: GETs a path and gives its JSON.
  constructor(panel, ask) {
    this.panel = panel;
    this.ask = ask;
    this.before = null;
    this.find = (id) => panel.querySelector(`#${id}`);
    for (const [place, text] of Object.entries(PLACES)) {
      const item = node("li"), patch = node("canvas");
      item.append(patch, ` ${text}`);
      this.find("legend").append(item);
      patch.dataset.place = place;
    }
    this.timer = setTimeout(() => this.run(), 0);
  }

  wake() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.run(), 50);
  }

  async run() {
    let isBusy = false;
    if (!document.hidden && !this.panel.classList.contains("closed")) {
      try {
        const map = await this.ask("/kv_blocks");
        isBusy = map.stats.num_running + map.stats.num_waiting > 0;
        this.show(map);
      } catch {
        this.before = null; // the page says elsewhere what is wrong
      }
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.run(), isBusy ? BUSY_MS : IDLE_MS);
  }

  show(map) {
    this.colours = getComputedStyle(document.documentElement);
    for (const patch of this.find("legend").querySelectorAll("canvas")) {
      this.draw(patch, [[patch.dataset.place, 1]]);
    }
    this.showSpeeds(map);
    const { stats } = map;
    const tiers = [[stats.tiers[0], stats.device], [stats.tiers[1], stats.host]];
    this.find("tiers").replaceChildren(...tiers.filter(([, use]) => use).map(([name, use], index) => {
      const runs = [[index ? "host" : "device", use.num_used], ["cached", use.num_cached], ["empty", use.num_free]];
      const mib = Number(((use.num_blocks * map.block_bytes) / 2 ** 20).toPrecision(3));
      const text = `${name}, ${mib} MiB: ${number(use.num_used)} of ${number(use.num_blocks)} blocks used, ${number(use.num_cached)} cached`;
      return this.strip(text, runs);
    }));
    this.find("requests").replaceChildren(...map.requests.map((request) => {
      const parts = [`request ${request.number}`, request.status, `${number(request.num_computed)} of ${number(request.num_tokens)} tokens`];
      if (request.is_streamed) parts.push("streams each step");
      if (request.num_guessed) parts.push(`${request.num_accepted} of ${request.num_guessed} drafted tokens right`);
      return this.strip(parts.join(", "), request.runs);
    }));
  }

  showSpeeds(map) {
    const now = map.stats, then = this.before?.stats;
    const seconds = then ? map.time_s - this.before.time_s : 0;
    this.before = map;
    const rate = (name, text) => (seconds > 0 ? text((now[name] - then[name]) / seconds) : "–");
    const rows = [
      ["Requests", `${now.num_running} running, ${now.num_waiting} waiting`],
      ["Output", rate("num_output_tokens", (tokens) => `${tokens.toFixed(1)} tok/s`)],
    ];
    if (now.host) {
      rows.push(["Host to device", rate("h2d_bytes", speed)], ["Device to host", rate("d2h_bytes", speed)]);
    }
    if (now.num_guessed) rows.push(["Drafted tokens right", percent(now.num_accepted, now.num_guessed)]);
    rows.push(["Prompt tokens from the cache", percent(now.num_cached_tokens, now.num_looked_up_tokens)]);
    this.find("speeds").replaceChildren(...rows.flatMap(([name, value]) => [node("dt", name), node("dd", value)]));
  }

  strip(text, runs) {
    const figure = node("figure"), canvas = node("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", runs.map(([place, count]) => `${count} ${PLACES[place]}`).join(", "));
    figure.append(node("figcaption", text), canvas);
    this.draw(canvas, runs);
    return figure;
  }

  // Runs of blocks from left to right.
  draw(canvas, runs) {
    const total = runs.reduce((sum, [, count]) => sum + count, 0);
    canvas.width = 600;
    canvas.height = 22;
    const context = canvas.getContext("2d");
    let begun = 0;
    for (const [place, count] of runs) {
      const left = (600 * begun) / total, width = (600 * count) / total;
      begun += count;
      context.fillStyle = this.colours.getPropertyValue(`--${place}`);
      context.fillRect(left, 0, Math.max(width, 0.5), 22);
      const step = 600 / total;
      if (place === "empty" || step < 5) continue;
      context.fillStyle = this.colours.getPropertyValue("--back"); // a gap between blocks
      for (let at = left + step; at < left + width + 1; at += step) context.fillRect(at - 1, 0, 1, 22);
    }
  }
}
