// Tests connecting a mailbox at Gmail in a real browser without JavaScript:
//
//   node gmail.mjs BASE_URL SETUP_LINK OUT_DIR CLIENT_ID CLIENT_SECRET ACCOUNT
//
// The stand-in for Google is another site, so the browser brings no cookie back from it.
// It prints a line for each check and exits with status 0 if all passed.
import { base, check, complaints, fill, finish, link, name, open, password, rest } from './kit.mjs'

const [id, secret, account] = rest

async function run() {
  const context = await open()
  const page = await context.newPage()
  await page.goto(link)
  await fill(page, { Name: name, Password: password, 'Repeat password': password })
  await page.getByRole('button', { name: 'Create account' }).click()
  const begin = async (client) => {
    await page.goto(new URL('/console/mailboxes/gmail', base).href)
    await fill(page, { 'Client ID': client, 'Client secret': secret })
    await page.getByRole('button', { name: 'Sign in at Google' }).click()
  }
  await begin('a b')
  check('an invalid client ID is refused with an explanation', /client_id/.test(await page.getByRole('alert').innerText()))

  await begin(id)
  const there = await page.getByRole('link', { name: 'Continue to Google' }).getAttribute('href')
  check('the address at Google has no secret', !there.includes(secret) && there.includes('code_challenge_method=S256'), there)
  await page.getByRole('link', { name: 'Continue to Google' }).click()
  await page.getByRole('button', { name: 'Cancel' }).click()
  await page.getByRole('button', { name: 'Go on' }).click()
  check('a refusal by Google is reported', /Nothing was connected/.test(await page.getByRole('alert').innerText()))

  await begin(id)
  await page.getByRole('link', { name: 'Continue to Google' }).click()
  check('the browser is at Google', new URL(page.url()).origin !== new URL(base).origin)
  await page.getByLabel('Account').selectOption(account)
  await page.getByRole('button', { name: 'Continue' }).click()
  const back = page.url()
  check('Google sends the browser back', back.startsWith(new URL('/console/mailboxes/gmail/callback?', base).href), back)

  // The attack: the same address in a browser that has begun no sign-in, or another one.
  const other = await open({ storageState: await context.storageState() })
  await other.clearCookies({ name: 'postern_gmail' })
  const victim = await other.newPage()
  await victim.goto(back)
  await victim.getByRole('button', { name: 'Connect this mailbox' }).click()
  check('another browser connects nothing', /begun no sign-in/.test(await victim.getByRole('alert').innerText()))

  await page.getByRole('button', { name: 'Connect this mailbox' }).click()
  const main = await page.locator('main').innerText()
  check('the mailbox is an inbox with a key', main.includes(account) && /pib_[A-Z2-7]{26}/.test(main), main)
  await page.goBack().catch(() => {})
  await page.goto(new URL('/console/inboxes', base).href)
  check('it is in the list', (await page.locator('main').innerText()).includes(account))
  check('the browser complains about nothing', complaints.length === 0, complaints.join('\n'))
}

await finish(run)
