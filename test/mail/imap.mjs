// Reads an inbox with imapflow.
import assert from 'node:assert'
import { ImapFlow } from 'imapflow'

const client = new ImapFlow({
  host: 'localhost', port: Number(process.env.PORT), secure: true, logger: false,
  auth: { user: process.env.IMAP_USER, pass: process.env.KEY },
})
await client.connect()
assert.equal(client.serverInfo.name, 'Postern')
const list = await client.list()
assert.deepEqual(list.map(f => f.path).sort(), ['Archive', 'Drafts', 'INBOX', 'Sent', 'Trash'])
assert.equal(list.find(f => f.path === 'Trash').specialUse, '\\Trash')
const status = await client.status('INBOX', { messages: true, unseen: true, uidNext: true })
assert.equal(status.messages, 2)
const lock = await client.getMailboxLock('INBOX')
const messages = await client.fetchAll('1:*', { uid: true, flags: true, envelope: true, bodyStructure: true, size: true, internalDate: true })
const second = messages.find(m => m.envelope.subject === 'Grüße')
assert.equal(second.envelope.from[0].name, 'Böb')
assert.equal(second.bodyStructure.childNodes[1].dispositionParameters.filename, 'ü.bin')
const { content } = await client.download(second.uid, '2', { uid: true })
let file = ''
for await (const chunk of content) file += chunk
assert.equal(file, 'hello')
assert.ok(await client.messageFlagsAdd(second.uid, ['\\Seen', 'project'], { uid: true }))
assert.deepEqual(await client.search({ keyword: 'project' }, { uid: true }), [second.uid])
assert.ok(await client.messageFlagsRemove(second.uid, ['project'], { uid: true }))
const moved = await client.messageMove(second.uid, 'Archive', { uid: true })
assert.ok(moved.uidMap.get(second.uid) > 0)
// What a person has to approve is refused with the action's id.
const [other] = await client.search({ all: true }, { uid: true })
const trashed = await client.messageMove(other, 'Trash', { uid: true })
assert.ok(!trashed || !trashed.uidMap?.size, JSON.stringify(trashed))
lock.release()
const archive = await client.getMailboxLock('Archive')
await client.messageMove('1:*', 'INBOX')
archive.release()
const draft = await client.append('Drafts', 'To: bob@example.com\r\nSubject: Plan\r\n\r\nHello\r\n', ['\\Draft'])
assert.ok(draft.uid > 0)
const drafts = await client.getMailboxLock('Drafts')
assert.ok(await client.messageDelete(draft.uid, { uid: true }))
drafts.release()
// New mail is told while it waits.
const inbox = await client.getMailboxLock('INBOX')
const came = new Promise(resolve => client.on('exists', resolve))
setTimeout(() => console.log('waiting'), 50)
client.idle()
const { count, prevCount } = await came
assert.equal(count, prevCount + 1)
assert.ok((await client.fetchOne('*', { source: true })).source.includes('while it waited'))
inbox.release()
await client.logout()
console.log('imapflow is content')
