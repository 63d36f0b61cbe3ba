// Walks through the console from link to link and checks each page:
//
//   node access.mjs BASE_URL SETUP_LINK OUT_DIR NAME PASSWORD PATH
//
// NAME and PASSWORD sign in to a project that is full; SETUP_LINK makes the account of
// one that is empty. PATH is an action of a kind that a walk among thousands would miss.
// It writes the paths that it reached to OUT_DIR/reached.json.
//
// With POSTERN_TEST_ACCESS=all it follows every link, which takes minutes ("make access").
// Otherwise it checks the pages that people use most.
import { base, check, complaints, fill, finish, foreign, link, open, out, password, rest, sound, walk } from './kit.mjs'
import { writeFileSync } from 'node:fs'
import { join } from 'node:path'

const [full, secret, rare] = rest
const all = process.env.POSTERN_TEST_ACCESS === 'all'
const main = ['/console/', '/console/review', '/console/agents', '/console/sandboxes', '/console/runs', '/console/inboxes', '/console/audit', '/console/policy', '/console/switches', '/console/keys', '/console/account']

async function run() {
  // What nobody needs to sign in for.
  await sound('nobody signed in', ['/console/signin', '/console/nothing', '/console/setup?token=x'])

  const context = await open()
  const page = await context.newPage()
  await page.goto(new URL('/console/signin', base).href)
  await fill(page, { Name: full, Password: secret })
  await page.getByRole('button', { name: 'Sign in', exact: true }).click()
  const state = await context.storageState()
  const also = ['/console/policy/draft', '/console/recover', '/console/nothing', '/console/actions/act_nothing', '/console/stepup']
  await page.goto(new URL('/console/review', base).href)
  const action = await page.locator('a.row').first().getAttribute('href')
  const reached = all ? await walk(state, ['/console/', rare, ...also]) : [...main, action]
  await sound('a full project', reached, state)
  writeFileSync(join(out, 'reached.json'), JSON.stringify(reached.map((p) => p.split(/[?#]/)[0])))

  // A page that shows a form again with what is wrong.
  await page.goto(new URL('/console/domains', base).href)
  await fill(page, { Domain: 'co.uk' })
  await page.getByRole('button', { name: 'Add domain' }).click()
  check('what is wrong is said', await page.getByRole('alert').count() === 1)

  const other = await open()
  const eve = await other.newPage()
  await eve.goto(link)
  await fill(eve, { Name: 'eve', Password: password, 'Repeat password': password })
  await eve.getByRole('button', { name: 'Create account' }).click()
  const empty = await other.storageState()
  await sound('an empty project', all ? await walk(empty, ['/console/', ...also]) : main.slice(0, 3), empty)

  check('the pages load nothing from another host', foreign.length === 0, foreign.join(' '))
  check('the browser logs no error', complaints.length === 0, complaints.join(' | '))
}

await finish(run)
