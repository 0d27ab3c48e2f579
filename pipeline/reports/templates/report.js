"use strict";
// Sorts a table by the column of a clicked heading: by `data-value` or the number that a cell begins with, else by text.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = Array.from(table.tHead.rows[0].cells);
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    heading.replaceChildren(button);
    heading.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const descending = heading.getAttribute("aria-sort") === "ascending";
      for (const other of headings) other.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const key = (row) => {
        const cell = row.cells[column];
        const text = cell.dataset.value ?? cell.textContent.trim().replace(/,(?=\d{3})/g, "");
        return [Number.parseFloat(text), cell.textContent.trim()];
      };
      const rows = Array.from(table.tBodies[0].rows, (row) => [key(row), row]);
      rows.sort(([[a, s], ], [[b, t], ]) => {
        const order = Number.isNaN(a) || Number.isNaN(b)
          ? Number.isNaN(a) - Number.isNaN(b) || s.localeCompare(t) : a - b;
        return descending ? -order : order;
      });
      table.tBodies[0].append(...rows.map(([, row]) => row));
    });
  });
}
// Shows the samples whose status, error code and text are those of the filters.
const filters = document.getElementById("filters");
if (filters) {
  const articles = Array.from(document.querySelectorAll("#gallery article"));
  const fields = Array.from(filters.querySelectorAll("[data-filter]"));
  const count = filters.querySelector("[role=status]");
  const apply = () => {
    const wanted = Object.fromEntries(fields.map((field) => [field.dataset.filter, field.value]));
    const text = (wanted.text ?? "").trim().toLowerCase();
    let shown = 0;
    for (const article of articles) {
      const matches = (!wanted.status || article.dataset.status === wanted.status)
        && (!wanted.error || article.dataset.error === wanted.error)
        && (!text || article.textContent.toLowerCase().includes(text));
      article.hidden = !matches;
      shown += matches;
    }
    count.textContent = shown === articles.length ? "" : `${shown} of ${articles.length} shown`;
  };
  for (const field of fields) field.addEventListener("input", apply);
  filters.hidden = false;
}
