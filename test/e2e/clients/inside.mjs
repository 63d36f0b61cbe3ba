// The same as inside.py, with fetch. Argument: the address of the server.
const base = process.argv[2]
const ask = async (path, body) => {
  const r = await fetch(base + path, body && { method: 'POST', body: JSON.stringify(body), headers: { 'Content-Type': 'application/json' } })
  if (!r.ok) throw new Error(`${path}: ${r.status} ${await r.text()}`)
  return r.json()
}
if (!(await ask('/v1/me')).can_read) throw new Error('cannot read')
const subject = `fetch at ${base}`
let mark = (await ask('/v1/inboxes/me/messages/wait?timeout=0')).after
const action = await ask('/v1/inboxes/me/messages', { to: ['bob@example.com'], subject, text: 'Hello' })
while ((await ask(`/v1/actions/${action.id}?wait=60`)).state === 'pending');
let mine
while (!mine) {
  const got = await ask(`/v1/inboxes/me/messages/wait?timeout=60&after=${mark}`)
  mark = got.after
  mine = got.messages.find((m) => m.subject === `Re: ${subject}`)
}
const full = await ask(`/v1/inboxes/me/messages/${mine.id}`)
if (full.text.trim() !== 'Hello robot') throw new Error(JSON.stringify(full))
console.log('answered', (await ask(`/v1/inboxes/me/messages/${full.id}/reply`, { text: 'Hello back' })).status)
