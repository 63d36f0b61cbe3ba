// Sends by nodemailer's service 'gmail'. Arguments: gmail or dkim, the sender, the recipient.
const { generateKeyPairSync } = require('node:crypto')
const nodemailer = require('/opt/nodemailer')

const [way, from, to] = process.argv.slice(2)
const auth = { user: 'user@gmail.com', pass: 'pass-of-the-program' }
const dkim = { domainName: 'agents.internal', keySelector: 'mine', privateKey: generateKeyPairSync('rsa', { modulusLength: 2048 }).privateKey.export({ type: 'pkcs8', format: 'pem' }) }
const transport = nodemailer.createTransport(way === 'dkim' ? { host: 'smtp.example.com', port: 587, requireTLS: true, auth, dkim } : { service: 'gmail', auth })
transport.sendMail({ from, to, subject: `nodemailer-${way}`, text: `sent by nodemailer-${way}\n.a line with a dot\n` }).catch((err) => {
  console.error(err)
  process.exitCode = 1
})
