// Tables that the theme lets scroll sideways can be scrolled with the keyboard.
window.addEventListener("load", () => {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
});
