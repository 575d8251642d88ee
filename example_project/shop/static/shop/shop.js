// Keep the table of imports up to date.
const table = document.getElementById("imports");

setInterval(async () => {
  if (document.hidden) return;
  try {
    const page = new DOMParser().parseFromString(await (await fetch("/")).text(), "text/html");
    table.tBodies[0].replaceWith(page.getElementById("imports").tBodies[0]);
  } catch {
    // The shop is closed or busy; the next round tries again.
  }
}, Number(table.dataset.refresh));
