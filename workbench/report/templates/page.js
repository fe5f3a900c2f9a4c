// Sorts a table by the column whose heading is pressed; a second press turns the order round.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  for (const heading of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const descending = heading.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const key = (row) => row.cells[heading.cellIndex].dataset.sort;
      const absent = (text) => text === "nan" || text === "None" || text === "";
      const sorted = [...original].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (absent(x) || absent(y)) return absent(x) - absent(y);
        const difference = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return descending ? -difference : difference;
      });
      body.append(...sorted);
    });
  }
}
