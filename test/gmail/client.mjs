// Google's own client of the Gmail API, against a stand-in: node client.mjs URL ID SECRET REFRESH.
// It fails where an answer is not what the client's types promise.
import assert from 'node:assert/strict'
import { gmail, auth } from '@googleapis/gmail'

const [url, id, secret, refresh] = process.argv.slice(2)
const oauth = new auth.OAuth2({ clientId: id, clientSecret: secret, endpoints: { oauth2TokenUrl: url + '/token', oauth2RevokeUrl: url + '/revoke' } })
oauth.setCredentials({ refresh_token: refresh })
const api = gmail({ version: 'v1', auth: oauth, rootUrl: url + '/' })
const me = { userId: 'me' }
const raw = (text) => Buffer.from(text.replaceAll('\n', '\r\n')).toString('base64url')

const profile = (await api.users.getProfile(me)).data
assert.match(profile.historyId, /^\d+$/)
const mine = profile.emailAddress

// Labels.
const label = (await api.users.labels.create({ ...me, requestBody: { name: 'From client' } })).data
assert.equal((await api.users.labels.get({ ...me, id: label.id })).data.name, 'From client')
await assert.rejects(api.users.labels.create({ ...me, requestBody: { name: 'from CLIENT' } }), (e) => e.status === 409)
assert.ok((await api.users.labels.list(me)).data.labels.some((l) => l.id === 'INBOX' && l.type === 'system'))

// Send, as JSON and as an upload, to oneself.
const first = (await api.users.messages.send({ ...me, requestBody: { raw: raw(`From: ${mine}\nTo: ${mine}\nSubject: one\nMessage-ID: <one@client.example>\n\nHello\n`) } })).data
assert.deepEqual(first.labelIds.includes('SENT'), true)
const got = (await api.users.messages.get({ ...me, id: first.id })).data
assert.equal(got.payload.headers.find((h) => h.name === 'Subject').value, 'one')
assert.equal(Buffer.from(got.payload.body.data, 'base64url').toString(), 'Hello\r\n')
const uploaded = (await api.users.messages.send({ ...me, requestBody: { threadId: first.threadId }, media: { mimeType: 'message/rfc822', body: `From: ${mine}\r\nTo: ${mine}\r\nSubject: two\r\n\r\nHello\r\n` } }, { rootUrl: url + '/' })).data
assert.equal(uploaded.threadId, first.threadId)
await assert.rejects(api.users.messages.send({ ...me, requestBody: { raw: raw('From: x@y.example\n\nnobody\n') } }), (e) => e.status === 400 && /Recipient/.test(e.message))

// Lists, threads, changes.
assert.equal((await api.users.messages.list({ ...me, q: 'subject:one' })).data.messages.length, 1)
assert.equal((await api.users.messages.list({ ...me, maxResults: 1 })).data.nextPageToken, '1')
assert.equal((await api.users.threads.get({ ...me, id: first.threadId })).data.messages.length, 2)
assert.equal((await api.users.threads.list(me)).data.threads.length, 1)
await api.users.messages.modify({ ...me, id: first.id, requestBody: { addLabelIds: [label.id], removeLabelIds: ['UNREAD'] } })
await api.users.messages.batchModify({ ...me, requestBody: { ids: [first.id, uploaded.id], addLabelIds: ['STARRED'] } })
await assert.rejects(api.users.messages.modify({ ...me, id: first.id, requestBody: { addLabelIds: ['SENT'] } }), (e) => e.status === 400)
await api.users.messages.trash({ ...me, id: first.id })
assert.equal((await api.users.messages.list({ ...me, q: 'subject:one' })).data.messages, undefined)
await api.users.messages.untrash({ ...me, id: first.id })
const history = (await api.users.history.list({ ...me, startHistoryId: profile.historyId })).data
assert.ok(history.history.some((h) => h.messagesAdded?.[0].message.id === first.id))
assert.ok(history.history.some((h) => h.labelsRemoved?.[0].labelIds.includes('UNREAD')))
await assert.rejects(api.users.history.list({ ...me, startHistoryId: '1' }), (e) => e.status === 404)
await assert.rejects(api.users.messages.get({ ...me, id: 'ffffffffffffffff' }), (e) => e.status === 404)
await assert.rejects(api.users.messages.delete({ ...me, id: first.id }), (e) => e.status === 403) // gmail.modify does not

// Drafts.
const draft = (await api.users.drafts.create({ ...me, requestBody: { message: { raw: raw(`From: ${mine}\nTo: ${mine}\nSubject: draft\n\nx\n`) } } })).data
assert.equal((await api.users.drafts.list(me)).data.drafts.length, 1)
assert.ok((await api.users.drafts.send({ ...me, requestBody: { id: draft.id } })).data.id)
assert.equal((await api.users.watch({ ...me, requestBody: { topicName: 'projects/p/topics/t' } })).status, 200)

await oauth.revokeToken(refresh)
console.log('ok')
