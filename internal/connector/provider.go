package connector

import (
	"context"
	"errors"
	"fmt"
	"time"

	"postern/internal/mail"
)

// The errors that a [Provider] returns, one for each decision of its caller. Other
// errors are temporary: the caller tries again, each time later.
var (
	// ErrSignIn means that the credential is refused or was withdrawn. Only a person
	// can help.
	ErrSignIn = errors.New("the provider refuses the credential: sign in again")
	// ErrGone means that the provider has no such message under this id any more.
	ErrGone = errors.New("the message is gone at the provider")
	// ErrCursor means that the provider knows the cursor no longer: the next call of
	// Changes starts again, with an empty one.
	ErrCursor = errors.New("the cursor has expired")
	// ErrTooLarge means that a message exceeds [MaxMessage]. It is left out, and the
	// connection says so.
	ErrTooLarge = errors.New("the message is too large")
)

// A RetryError means that the provider asks for patience: too many requests, or a
// quota is used up.
type RetryError struct {
	After time.Duration // from now; at least one second is waited
	Err   error         // what the provider said; never nil
}

// Error implements error.
func (e *RetryError) Error() string {
	return fmt.Sprintf("%v; it is tried again in %v", e.Err, e.After.Round(time.Second))
}

// Unwrap returns Err.
func (e *RetryError) Unwrap() error { return e.Err }

// MaxMessage bounds an imported message, in bytes. It is the limit of the SMTP server, too.
const MaxMessage = mail.MaxMessageBytes

// A Place is where a message lies at the provider.
type Place string

// The places. What is in the inbox, the archive and the trash is taken in as mail
// that arrived; what was sent is taken in as mail that was sent.
const (
	Inbox   Place = "inbox"
	Archive Place = "archive"
	Sent    Place = "sent"
	Trash   Place = "trash"
	// Ignored are drafts, spam, and everything that the provider does not show. Such
	// messages are not taken in; a message that moves there is removed here.
	Ignored Place = "ignored"
)

// A State is what a provider says about a message besides its bytes.
type State struct {
	Place   Place
	Read    bool
	Starred bool
	// Labels are further labels in the form of [Label]. Those that are reserved here
	// are left out.
	Labels []string
}

// A Change is a message that is new or has changed, or is gone. IDs are the
// provider's: printable ASCII without spaces, at most 500 bytes, and never used
// again for another message.
type Change struct {
	ID   string
	Gone bool  // there is no such message any more; At means nothing then
	At   State // unless it is Gone
	// Received is when the provider received it; zero means unknown.
	Received time.Time
	// Replaces is the ID that the message had before, where the provider gives
	// another one to a message that moves and says which. Empty means unknown: then
	// the message is recognised by its bytes.
	Replaces string
	// Total is how many messages this call of Changes will report in all, or 0 if
	// that is not known. It is only shown.
	Total int
}

// A Message is a message as the provider has it.
type Message struct {
	Raw    []byte    // as it is; lines may end in LF alone
	At     time.Time // when the provider received it; zero means unknown
	State  State
	Thread string // the provider's id of its thread, at most 500 bytes; empty means none
	// AuthServ is the name under which the provider records Authentication-Results
	// (RFC 8601 2.5) and which it removes from what arrives. Empty means that no such
	// field is believed.
	AuthServ string
}

// A Modification is what to change of a message. Nothing is changed that it does not
// name.
type Modification struct {
	Read    *bool
	Starred *bool
	Add     []string // labels, in the form of [Label]
	Remove  []string
	// Move is where the message shall lie: Inbox, Archive or Trash. Empty means that
	// it stays.
	Move Place
}

// Bounds limit the first synchronisation.
type Bounds struct {
	Since time.Time // only messages that the provider received from then on; zero means all
	Most  int       // at most so many, the newest; 0 means [DefaultMost]
}

// The number of messages that a first synchronisation takes.
const (
	DefaultMost = 1000
	MaxMost     = 50_000
)

// A Provider is an open mailbox at a provider. It is used by one goroutine at a time.
//
// Everything that the other side says is hostile. An implementation bounds what it
// reads: sizes, counts, names, and the time of each answer, 1 minute where the
// context ends no sooner. It logs no credential and puts none into an error; errors
// are shown to people, so they are printable and at most 500 bytes.
type Provider interface {
	// Changes calls each for what changed since the cursor, and returns the cursor
	// behind it. With an empty cursor it calls each for every message within the
	// bounds, the newest first. New and changed messages come before those that are
	// gone, so that a message which has moved is known at its new place before its old
	// one ends. A change may be reported twice. If each returns an error, Changes stops
	// and returns it. Cursors are printable ASCII of at most 1 MiB, opaque to the
	// caller, and hold no credential.
	//
	// An empty cursor after another one means that changes were missed: then the
	// caller compares what was reported with what it has, and Bounds do not limit what
	// the caller has already.
	Changes(ctx context.Context, cursor string, b Bounds, each func(Change) error) (next string, err error)
	// Fetch returns a message, or [ErrGone] or [ErrTooLarge].
	Fetch(ctx context.Context, id string) (Message, error)
	// Apply changes a message and returns the id that it has then, which is empty if
	// the provider does not say. Applying what is so already changes nothing. It
	// returns [ErrGone] if the message is gone, or moved where it cannot be seen.
	Apply(ctx context.Context, id string, m Modification) (now string, err error)
	// Send hands e.Raw to the provider, unchanged and once, for all of e.To, and
	// returns one result for each recipient in the order of e.To. E.Prefix is always
	// empty. An error means that nothing was sent to anybody, and wraps [ErrSignIn] or
	// is a [*RetryError] where it is one. After a loss of the connection in which the
	// provider may have taken the message, the results are uncertain and not an error.
	Send(ctx context.Context, e mail.Envelope) ([]mail.Delivery, error)
	// Wait returns when something may have changed since the cursor, after ctx ends,
	// or after some minutes at the latest. It must not ask in a tight loop.
	Wait(ctx context.Context, cursor string) error
	// Revoke withdraws the credential at the provider, if that has a way to. Without
	// one it returns nil.
	Revoke(ctx context.Context) error
	// Close ends it. The context of a call under way has ended then.
	Close() error
}

// A Checker is a [Provider] kind that cannot send every envelope. Check is called
// before the action is proposed, without a connection, and returns why e can never
// leave through this provider, as a [mail.FieldError] where a field is to blame.
type Checker interface {
	Check(e mail.Envelope) error
}

// A Kind names a provider: "imap", "gmail".
type Kind string

// Settings are what a connection is made of. They are stored encrypted as a whole
// and bound to their row, so that nobody who can write the database makes this
// server show the credential to another host.
type Settings struct {
	Kind    Kind   `json:"kind"`
	Address string `json:"address"` // of the mailbox, lower case
	// Public is what people may see: hosts, user name, identity of the client. Keys are
	// the kind's own.
	Public map[string]string `json:"public"`
	// Credential is the password or the refresh token, in a form of the kind's own.
	Credential string `json:"credential"`
}

// String implements [fmt.Stringer]: without the credential.
func (s Settings) String() string { return string(s.Kind) + " " + s.Address }

// GoString implements [fmt.GoStringer].
func (s Settings) GoString() string { return s.String() }

// An Opener makes providers of one kind. It is safe for concurrent use.
type Opener interface {
	// Prepare checks the settings that a person gave, fills in defaults, and proves them
	// by signing in: it connects to every server that the connection will use. The
	// returned address is whose the mailbox is, as the provider says, or as the person
	// did where a provider does not say.
	Prepare(ctx context.Context, s Settings) (Settings, error)
	// Open returns a provider. It may connect at the first call. Renewed stores a new
	// credential durably before the old one may be forgotten; a provider whose
	// credential never changes does not call it.
	Open(ctx context.Context, s Settings, renewed func(ctx context.Context, credential string) error) (Provider, error)
}
