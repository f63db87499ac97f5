"use strict";
for (const figure of document.querySelectorAll("figure")) {
  const output = figure.querySelector("output");
  if (!output) continue;
  const hint = output.textContent;
  const tell = (mark) => {
    const title = mark && mark.matches("svg *") && mark.querySelector(":scope > title");
    output.textContent = title ? title.textContent : hint;
    output.classList.toggle("told", Boolean(title));
  };
  figure.addEventListener("pointerover", (event) => tell(event.target));
  figure.addEventListener("pointerleave", () => tell(document.activeElement));
  figure.addEventListener("focusin", (event) => tell(event.target));

  // One tab stop a map; arrows, Home and End walk from cell to cell.
  const cells = [...figure.querySelectorAll(".cell")];
  const place = (cell) => [Number(cell.dataset.row), Number(cell.dataset.column)];
  figure.addEventListener("keydown", (event) => {
    const at = cells.indexOf(event.target);
    if (at < 0) return;
    const [row, column] = place(event.target);
    const line = cells.filter((cell) => place(cell)[0] === row);
    const beyond = (step) => {
      const rows = cells.filter((cell) => Math.sign(place(cell)[0] - row) === step);
      const next = rows.filter((cell) => place(cell)[0] === (step > 0 ? Math.min : Math.max)(...rows.map((c) => place(c)[0])));
      return next.sort((a, b) => Math.abs(place(a)[1] - column) - Math.abs(place(b)[1] - column))[0];
    };
    const moves = {
      ArrowRight: () => line[line.indexOf(event.target) + 1],
      ArrowLeft: () => line[line.indexOf(event.target) - 1],
      ArrowDown: () => beyond(1),
      ArrowUp: () => beyond(-1),
      Home: () => line[0],
      End: () => line[line.length - 1],
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const target = moves[event.key]();
    if (!target) return;
    event.target.tabIndex = -1;
    target.tabIndex = 0;
    target.focus();
  });
}
