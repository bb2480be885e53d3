// Filters and what a token is, on hover. Text goes in as text: nothing here makes markup of data.
const byId = (id) => document.getElementById(id);
const rows = [...document.querySelectorAll("article")];
const buttons = [...document.querySelectorAll("#filters button")];
let kind = "all";

function apply() {
  const source = byId("source").value;
  const words = byId("words").value.toLowerCase();
  let count = 0;
  for (const row of rows) {
    const kinds = row.dataset.kinds.split(" ");
    const fits =
      (kind === "all" || kinds.includes(kind)) &&
      (source === "" || row.dataset.source === source) &&
      (words === "" || row.textContent.toLowerCase().includes(words));
    row.hidden = !fits;
    count += fits;
  }
  byId("shown").textContent = `${count} of ${rows.length} shown`;
}

for (const button of buttons) {
  button.addEventListener("click", () => {
    kind = button.dataset.kind;
    for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
    apply();
  });
}
byId("source").addEventListener("change", apply);
byId("words").addEventListener("input", apply);

const tip = byId("tip");
document.addEventListener("pointerover", (event) => {
  const token = event.target instanceof Element ? event.target.closest("i[data-t]") : null;
  tip.hidden = token === null;
  if (token === null) return;
  const ids = token.dataset.t.split(" ");
  const learned = token.closest("mark") === null ? "read" : "learned";
  tip.textContent = `${ids.length > 1 ? "tokens" : "token"} ${ids.join(" ")} · ${learned}\n${JSON.stringify(token.textContent)}`;
  const place = token.getBoundingClientRect();
  const box = tip.getBoundingClientRect();
  const left = Math.min(Math.max(4, event.clientX), innerWidth - box.width - 8);
  const above = place.top - box.height - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 4 ? above : place.bottom + 6}px`;
});
apply();
