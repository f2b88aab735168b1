// The form of a template's parameters. Every text goes into a text node or a value, never into HTML.
import {element} from './drawing.js';

export default function form(Widget, parameters, given, refusal) {
  const node = element('div', 'workbench-form');
  const add = (tag, properties) => node.appendChild(Object.assign(document.createElement(tag), properties));
  if (refusal) add('div', {className: 'workbench-refused', role: 'alert', textContent: refusal});
  const fields = parameters.map(({name, default: standard, help, choices}) => {
    add('label', {textContent: name, htmlFor: `workbench-${name}`});
    const field = add(choices.length ? 'select' : 'input', {id: `workbench-${name}`});
    for (const choice of choices) field.append(new Option(choice));
    const before = choices.length ? standard.slice(1, -1) : standard; // a choice is shown without its quotes
    field.value = given[name] ?? before;
    add('small', {textContent: help});
    return {name, field, before};
  });
  // The keyboard begins at the field that the refusal names, or at the first.
  const refused = fields.find(({name}) => new RegExp(`(^|\\W)${name}(\\W|$)`).test(refusal));
  refused?.field.setAttribute('aria-invalid', 'true');
  (refused ?? fields[0])?.field.classList.add('workbench-begin');
  const widget = new Widget({node});
  // The values that differ from the template's; JupyterLab's dialog asks for them.
  widget.getValue = () =>
    Object.fromEntries(
      fields.filter(({field, before}) => field.value !== before).map(({name, field}) => [name, field.value])
    );
  return widget;
}
