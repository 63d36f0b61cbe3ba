// Package connector joins inboxes to mailboxes that exist already at other
// providers.
//
// A connected mailbox is an inbox like any other, so all doors, rules, modes and
// the gate apply to it without change. A connection is beside it: with which
// provider, by which credential, and how far it is synchronised.
//
//   - In: each message of the provider is fetched raw and taken in as arriving
//     mail: scanned, sealed, threaded, indexed. What changes there, changes here.
//     The cursor is stored in the transaction that stores what it covers, so that a
//     crash loses and doubles nothing.
//   - Out: what the gate released leaves through the provider, byte for byte, and
//     once. Labels, archive and trash are applied there, and tried again until they
//     are. Where both sides changed the same label, the provider's side wins.
//
// A connection moves like this:
//
//	syncing ──▶ connected ──▶ paused ──▶ syncing
//	   │            │
//	   └─────┬──────┘
//	         ▼
//	   needs sign-in ──▶ syncing      every state ──▶ revoked
//
// A server that somebody names is hostile, and so is all that it says: see
// [Provider]. No mail of this server is ever delivered to a connected address
// directly, since nobody has proved to this server whose address it is.
//
// This package must not decide what may leave, and shows a credential to nobody.
package connector
