package audit

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"postern/internal/store"
)

// A TreeHead is the content of a checkpoint: the number of entries in the record and
// the root of the tree over them.
type TreeHead struct {
	Origin string // identifies the record: the name of the key that signs it
	Size   int64  // entries
	Root   tlog.Hash
}

// maxCheckpoint bounds a signed checkpoint, in bytes. It leaves room for the
// signatures of several witnesses.
const maxCheckpoint = 16 << 10

// String returns h as the text of a checkpoint (c2sp.org/tlog-checkpoint).
func (h TreeHead) String() string {
	return fmt.Sprintf("%s\n%d\n%s\n", h.Origin, h.Size, base64.StdEncoding.EncodeToString(h.Root[:]))
}

// ParseTreeHead parses the text that [TreeHead.String] returns. It ignores the lines
// after the hash, which are extensions.
func ParseTreeHead(text string) (h TreeHead, err error) {
	lines := strings.SplitN(text, "\n", 4)
	if len(lines) != 4 || lines[0] == "" || len(text) > maxCheckpoint {
		return h, errors.New("read checkpoint: want an origin, a size and a hash, a line each")
	}
	// The specification forbids leading zeros, so that each tree has one text.
	if h.Size, err = strconv.ParseInt(lines[1], 10, 64); err != nil || h.Size < 0 || strconv.FormatInt(h.Size, 10) != lines[1] {
		return h, fmt.Errorf("read checkpoint: size %q: want a number", brief(lines[1]))
	}
	if h.Root, err = parseHash(lines[2]); err != nil {
		return h, fmt.Errorf("read checkpoint: %w", err)
	}
	for line := range strings.SplitSeq(strings.TrimSuffix(lines[3], "\n"), "\n") {
		if line == "" && lines[3] != "" {
			return h, errors.New("read checkpoint: an extension is empty")
		}
	}
	h.Origin = lines[0]
	return h, nil
}

// parseHash decodes a hash from base64. It accepts only the canonical encoding, since
// two texts for one hash would give two signed notes for one tree.
func parseHash(s string) (h tlog.Hash, err error) {
	b, err := base64.StdEncoding.Strict().DecodeString(s)
	if err != nil || len(b) != len(h) || base64.StdEncoding.EncodeToString(b) != s {
		return h, fmt.Errorf("hash %q: want %d bytes in base64", brief(s), len(h))
	}
	copy(h[:], b)
	return h, nil
}

// brief returns the first 60 bytes of s, for an error text: s may be hostile.
func brief(s string) string {
	if len(s) > 60 {
		return strings.ToValidUTF8(s[:60], "") + "…"
	}
	return s
}

// OpenCheckpoint verifies a signed checkpoint and returns its tree head and the
// signatures that keys verified. One of them must be by the key named like the
// origin. Otherwise the error wraps [ErrUnsigned].
func OpenCheckpoint(signed []byte, keys note.Verifiers) (TreeHead, []note.Signature, error) {
	if len(signed) > maxCheckpoint {
		return TreeHead{}, nil, fmt.Errorf("open checkpoint: more than %d bytes", maxCheckpoint)
	}
	n, err := note.Open(signed, keys)
	if err != nil {
		if _, ok := errors.AsType[*note.UnverifiedNoteError](err); ok {
			return TreeHead{}, nil, fmt.Errorf("open checkpoint: %w", ErrUnsigned)
		}
		return TreeHead{}, nil, fmt.Errorf("open checkpoint: %w", err)
	}
	h, err := ParseTreeHead(n.Text)
	if err != nil {
		return TreeHead{}, nil, err
	}
	// The attack: a checkpoint of another record, whose key the caller also trusts, is
	// passed off as one of this record.
	for _, s := range n.Sigs {
		if s.Name == h.Origin {
			return h, n.Sigs, nil
		}
	}
	return TreeHead{}, nil, fmt.Errorf("open checkpoint of %q: %w", brief(h.Origin), ErrUnsigned)
}

// claimed returns the tree head of a signed checkpoint without verifying a signature.
// It is for the server's own files and rows, which [Keeper] compares with the tree.
func claimed(signed []byte) (TreeHead, error) {
	_, err := note.Open(signed, note.VerifierList())
	unverified, ok := errors.AsType[*note.UnverifiedNoteError](err)
	if !ok {
		return TreeHead{}, fmt.Errorf("read checkpoint: %w", err)
	}
	return ParseTreeHead(unverified.Note.Text)
}

// The errors about checkpoints.
var (
	// ErrUnsigned means that no known key has signed a checkpoint.
	ErrUnsigned = errors.New("no known key has signed it")
	// ErrFork means that the record does not extend a checkpoint that was signed
	// before: entries were removed or rewritten. Nothing is signed then.
	ErrFork = errors.New("the record does not go on from what was signed before")
	// ErrNoCheckpoint means that no checkpoint exists yet, or none covers the entry.
	ErrNoCheckpoint = errors.New("no checkpoint covers it yet")
)

// A Signed is a checkpoint that is stored in the database.
type Signed struct {
	TreeHead
	Note []byte    // the signed text
	At   time.Time // when it was signed
}

// Checkpoint signs the current tree, stores the note and returns it, as part of tx.
// If a checkpoint of this size and origin is stored, it returns that. It returns
// [ErrFork] if the tree does not extend the newest stored checkpoint: a signature on
// both would prove that the server showed two records.
func Checkpoint(ctx context.Context, tx *store.Tx, signer note.Signer) ([]byte, error) {
	size, err := Size(ctx, tx)
	if err != nil {
		return nil, err
	}
	if size == 0 {
		return nil, fmt.Errorf("sign checkpoint: there are no entries: %w", ErrNoCheckpoint)
	}
	root, err := Root(ctx, tx, size)
	if err != nil {
		return nil, err
	}
	last, err := Latest(ctx, tx)
	if err != nil && !errors.Is(err, ErrNoCheckpoint) {
		return nil, err
	}
	if err == nil {
		if err := extends(ctx, tx, last.TreeHead); err != nil {
			return nil, err
		}
		if last.Size == size && last.Origin == signer.Name() {
			return last.Note, nil
		}
	}
	h := TreeHead{Origin: signer.Name(), Size: size, Root: root}
	signed, err := note.Sign(&note.Note{Text: h.String()}, signer)
	if err != nil {
		return nil, fmt.Errorf("sign checkpoint: %w", err)
	}
	_, err = tx.ExecContext(ctx, `insert into audit_checkpoint (size, root, note, at) values ($1, $2, $3, $4)
		on conflict (size) do update set note = excluded.note, at = excluded.at`, size, root[:], string(signed), store.Time(time.Now()))
	if err != nil {
		return nil, fmt.Errorf("store checkpoint: %w", err)
	}
	return signed, nil
}

// extends returns [ErrFork] unless the tree's first h.Size entries have the root
// h.Root.
func extends(ctx context.Context, tx *store.Tx, h TreeHead) error {
	size, err := Size(ctx, tx)
	if err != nil {
		return err
	}
	if h.Size > size {
		return fmt.Errorf("it has %d entries, and a checkpoint of %d was signed: %w", size, h.Size, ErrFork)
	}
	root, err := Root(ctx, tx, h.Size)
	if err != nil {
		return err
	}
	if root != h.Root {
		return fmt.Errorf("its first %d entries are not those that were signed: %w", h.Size, ErrFork)
	}
	return nil
}

const selectCheckpoint = `select size, root, note, at from audit_checkpoint `

// Latest returns the newest checkpoint, or an error that wraps
// [ErrNoCheckpoint], as part of tx.
func Latest(ctx context.Context, tx *store.Tx) (Signed, error) {
	return oneCheckpoint(ctx, tx, selectCheckpoint+`order by size desc limit 1`)
}

// Covering returns the smallest checkpoint that covers entry seq, or an error that
// wraps [ErrNoCheckpoint], as part of tx.
func Covering(ctx context.Context, tx *store.Tx, seq int64) (Signed, error) {
	return oneCheckpoint(ctx, tx, selectCheckpoint+`where size >= $1 order by size limit 1`, seq)
}

func oneCheckpoint(ctx context.Context, tx *store.Tx, query string, args ...any) (Signed, error) {
	list, err := store.List(ctx, tx, scanCheckpoint, query, args...)
	if err != nil {
		return Signed{}, fmt.Errorf("read checkpoint: %w", err)
	}
	if len(list) == 0 {
		return Signed{}, ErrNoCheckpoint
	}
	return list[0], nil
}

func scanCheckpoint(row func(...any) error) (s Signed, err error) {
	var root []byte
	var text string
	var at int64
	if err := row(&s.Size, &root, &text, &at); err != nil {
		return s, err
	}
	s.Note, s.At = []byte(text), store.FromTime(at)
	h, err := claimed(s.Note)
	// The columns are only an index. The note is what was signed, so it decides.
	if err == nil && (h.Size != s.Size || !bytes.Equal(h.Root[:], root)) {
		err = fmt.Errorf("the stored checkpoint of %d entries does not match its row", s.Size)
	}
	s.TreeHead = h
	return s, err
}

// Checkpoints returns all stored checkpoints, the smallest first, as part of tx.
func Checkpoints(ctx context.Context, tx *store.Tx) ([]Signed, error) {
	list, err := store.List(ctx, tx, scanCheckpoint, selectCheckpoint+`order by size`)
	if err != nil {
		return nil, fmt.Errorf("list checkpoints: %w", err)
	}
	return list, nil
}
