"use strict";
const said = document.getElementById("said");
for (const button of document.querySelectorAll(".replay button")) {
  const code = button.parentElement.querySelector("pre");
  button.hidden = false;
  button.addEventListener("click", async () => {
    let done = true;
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      // Where a page has no clipboard, the code is selected, for the reader's own keys.
      getSelection().selectAllChildren(code);
      done = false;
    }
    button.textContent = done ? "Copied" : "Selected";
    said.textContent = done ? "The lines were copied." : "The lines are selected: copy them with your keys.";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}
