// Before the first paint: the colours that were chosen here, or else the system's (style.css).
try {
  const chosen = localStorage.getItem("kvasir-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* a browser without storage has the system's colours */ }
