// The faults of a report, as a list of lines: run in the page by lab/report.
(() => {
  const wrong = [];
  const report = (line) => { if (wrong.length < 40) wrong.push(line); };
  const short = (text) => JSON.stringify(text.trim().slice(0, 60));
  const visible = (element) => element.getClientRects().length > 0;

  // Every plot is there, and its texts lie within it, apart from each other and from its bars.
  for (const plot of document.querySelectorAll(".plot")) {
    const name = plot.closest("figure").querySelector("figcaption").textContent;
    const box = plot.getBoundingClientRect();
    if (box.width < 200 || box.height < 40) report(`plot ${short(name)}: ${box.width} x ${box.height}`);
    const description = plot.querySelector("[role=img]")?.getAttribute("aria-label") ?? plot.querySelector(".row b")?.textContent;
    if (!description?.trim()) report(`plot ${short(name)}: no description`);
    if (!plot.querySelector(".bar > i, .curve")) report(`plot ${short(name)}: nothing is drawn`);
    const boxes = (selector) => [...plot.querySelectorAll(selector)]
      .map((element) => [element, element.getBoundingClientRect()]);
    const texts = boxes(".heading, .unit, .lines > p, span, b").filter(([element]) => element.textContent.trim());
    for (const [element, r] of texts) {
      if (!(r.width > 0 && r.height > 0)) report(`plot ${short(name)}: empty text`);
      if (element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).display !== "inline") {
        report(`plot ${short(name)}: ${short(element.textContent)} is wider than its place`);
      }
    }
    const drawn = boxes(".bar > i, .marker, .curve");
    for (const [element, r] of [...texts, ...drawn]) {
      const out = Math.max(box.left - r.left, r.right - box.right, box.top - r.top, r.bottom - box.bottom);
      if (!(out <= 1.5)) report(`plot ${short(name)}: ${short(element.textContent || element.tagName)} leaves it by ${out.toFixed(1)}`);
    }
    const overlap = (a, b) => Math.min(
      Math.min(a.right, b.right) - Math.max(a.left, b.left),
      Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top));
    texts.forEach(([one, a], index) => {
      for (const [other, b] of texts.slice(index + 1)) {
        if (overlap(a, b) > 3) report(`plot ${short(name)}: ${short(one.textContent)} over ${short(other.textContent)}`);
      }
      for (const [bar, b] of drawn.filter(([element]) => element.tagName === "I")) {
        if (overlap(a, b) > 3) report(`plot ${short(name)}: ${short(one.textContent)} over a ${bar.className}`);
      }
    });
  }

  // The page itself never scrolls sideways; tables do, within themselves.
  const page = document.scrollingElement;
  if (page.scrollWidth > page.clientWidth) {
    const wide = [...document.querySelectorAll("body *")]
      .filter((element) => element.getBoundingClientRect().right > page.clientWidth + 1 && !element.closest(".scroll"));
    report(`the page is ${page.scrollWidth} wide, the window ${page.clientWidth}: ${wide.map((element) => element.tagName + "." + element.className).slice(0, 3)}`);
  }

  for (const cell of document.querySelectorAll("th, td, .card, figcaption, dd, li")) {
    if (cell.scrollWidth > cell.clientWidth + 1) report(`${cell.tagName} ${short(cell.textContent)} is wider than its place`);
  }

  // WCAG 2.2, 1.4.3: text against what is painted below it; 1.4.11: what is drawn.
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const colour = (text) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (rgb) => rgb.slice(0, 3)
    .map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const contrast = (a, b) => {
    const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = colour(getComputedStyle(at).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255, 255];
  };
  let judged = 0;
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const inSvg = element instanceof SVGElement;
    if (!text || !visible(element) || ["title", "desc", "STYLE"].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    const ratio = contrast(colour(inSvg ? style.fill : style.color), ground(element));
    judged += 1;
    if (!(ratio >= 4.5)) report(`contrast ${ratio.toFixed(2)} of ${element.tagName} ${short(element.textContent)}`);
  }
  if (judged < 20) report(`only ${judged} texts were found`);
  for (const element of document.querySelectorAll("svg .curve, .bar .measured, .bar .published")) {
    const style = getComputedStyle(element);
    const painted = { curve: style.stroke, measured: style.backgroundColor, published: style.borderTopColor };
    const ratio = contrast(colour(painted[element.classList[0]]), ground(element.parentElement));
    if (!(ratio >= 3)) report(`contrast ${ratio.toFixed(2)} of ${element.getAttribute("class")}`);
  }

  // Names are unique; links within the page lead somewhere.
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  if (new Set(ids).size !== ids.length) report("an id is there twice");
  for (const link of document.querySelectorAll("a[href^='#']")) {
    if (!document.getElementById(link.hash.slice(1))) report(`${link.hash} leads nowhere`);
  }
  return wrong;
})()
