"use strict";
(() => {
  const search = document.getElementById("search");
  const shown = document.getElementById("shown");
  const toggle = document.getElementById("toggle-all");
  const sections = [...document.querySelectorAll("details.problem-section")];

  // Sorting: numbers by value, text with the numbers in it by value; cells without a value last.
  const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
  const keyOf = (row, column) => {
    const cell = row.cells[column];
    return (cell.dataset.v ?? cell.textContent).trim();
  };
  const sort = (th) => {
    const table = th.closest("table");
    const body = table.tBodies[0];
    const sign = th.ariaSort === "ascending" ? -1 : 1;
    for (const other of th.parentNode.cells) other.ariaSort = "none";
    th.ariaSort = sign === 1 ? "ascending" : "descending";
    const keyed = [...body.rows].map((row) => [keyOf(row, th.cellIndex), row]);
    const numeric = keyed.every(([key]) => key === "" || Number.isFinite(Number(key)));
    keyed.sort(([a], [b]) => {
      if (a === "" || b === "") return (a === "") - (b === "");
      return sign * (numeric ? a - b : collator.compare(a, b));
    });
    body.append(...keyed.map(([, row]) => row));
  };
  document.addEventListener("click", (event) => {
    const th = event.target.closest("table.sortable th");
    if (th) sort(th);
    const link = event.target.closest('a[href^="#"]');
    if (link) openTarget(link.hash); // before the page goes there, and also if it is there already
    const chip = event.target.closest("[data-search]");
    if (chip) {
      search.value = search.value === chip.dataset.search ? "" : chip.dataset.search;
      filter();
    }
  });

  // Filtering: a row stays if it, with the title of its problem, has every word.
  const titles = new Map(sections.map((one) => [one.dataset.key, one.dataset.title]));
  const rows = [...document.querySelectorAll("table.sortable tbody tr")].map((row) => {
    const cells = [...row.cells].map((cell) => cell.textContent).join(" ");
    const all = `${cells} ${titles.get(row.dataset.key) ?? ""}`;
    const text = all.replace(/\s+/g, " ").toLowerCase();
    return { row, section: row.closest("details"), text };
  });
  const total = rows.filter(({ section }) => section).length;
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = new Map(sections.map((one) => [one, 0]));
    for (const { row, section, text } of rows) {
      row.hidden = !words.every((word) => text.includes(word));
      if (section && !row.hidden) kept.set(section, kept.get(section) + 1);
    }
    let count = 0;
    for (const [section, number] of kept) {
      section.hidden = number === 0;
      count += number;
      if (words.length && number) section.open = true;
    }
    shown.textContent = words.length ? `${count} of ${total} rows` : `${total} rows`;
  };
  let waiting = 0;
  search.addEventListener("input", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(filter);
  });

  const openAll = (open) => {
    for (const one of sections) one.open = open;
    toggle.textContent = open ? "collapse all" : "expand all";
    toggle.setAttribute("aria-pressed", String(!open));
  };
  toggle.addEventListener("click", () => openAll(toggle.getAttribute("aria-pressed") === "true"));
  addEventListener("beforeprint", () => openAll(true));
  const openTarget = (hash) => {
    const target = document.getElementById(decodeURIComponent(hash.slice(1)));
    if (target instanceof HTMLDetailsElement) target.open = true;
  };
  addEventListener("hashchange", () => openTarget(location.hash));
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== search) {
      event.preventDefault();
      search.focus();
    } else if (event.key === "Escape" && document.activeElement === search) {
      search.value = "";
      filter();
    }
  });
  filter();
  openTarget(location.hash);
})();
