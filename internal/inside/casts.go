package inside

import (
	"bytes"
	"cmp"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"postern/internal/store"
)

// Limits of recordings. They stay as long as the logs of sandboxes.
const (
	castSize = 8 << 20 // bytes of the longest recording
	castEach = 50      // of one sandbox
	castFor  = 7 * 24 * time.Hour
	castAll  = 512 << 20 // bytes of all
)

var castName = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(i[a-z0-9]{20})-([0-9]{13,17})\.cast$`)
})

// Casts keeps recordings of terminals in a directory, as asciicast v2: what was shown,
// never what was typed, so that no password is in them that was not shown. Each file is
// encrypted line by line with AES-256-GCM, under a key that is derived from the server's,
// and bound to its name and the place of the line: a copy of the directory shows nothing,
// and no line moves to another recording or place. A file that lost its end opens up to
// there, as after a crash. It is safe for concurrent use.
type Casts struct {
	log  *slog.Logger
	dir  string
	aead cipher.AEAD
}

// castForm begins a file that is encrypted. Each line follows as its length (4 bytes, big
// endian), nonce and ciphertext. No asciicast begins so.
const castForm = "PSR1"

// NewCasts returns the recordings in dir, and creates dir if it does not exist. Key is the
// server's, at least 32 bytes. Recordings from before they were encrypted are encrypted.
func NewCasts(log *slog.Logger, dir string, key []byte) (*Casts, error) {
	if len(key) < 32 {
		return nil, errors.New("recordings: the server's key has fewer than 32 bytes")
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory of recordings: %w", err)
	}
	own, err := hkdf.Key(sha256.New, key, nil, "postern recording v1", 32)
	if err != nil {
		return nil, fmt.Errorf("derive key for recordings: %w", err)
	}
	block, err := aes.NewCipher(own)
	if err != nil {
		return nil, fmt.Errorf("derive key for recordings: %w", err)
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return nil, fmt.Errorf("derive key for recordings: %w", err)
	}
	c := &Casts{log, dir, aead}
	return c, c.encryptOld()
}

// encryptOld encrypts the recordings of a version that did not.
func (c *Casts) encryptOld() error {
	parts, err := filepath.Glob(filepath.Join(c.dir, "*.cast"+castPart)) // of a crash
	if err != nil {
		return fmt.Errorf("list recordings: %w", err)
	}
	for _, part := range parts {
		if err := os.Remove(part); err != nil {
			return fmt.Errorf("remove a half-written recording: %w", err)
		}
	}
	all, err := c.all()
	if err != nil {
		return err
	}
	for _, x := range all {
		path := filepath.Join(c.dir, x.Name)
		b, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("encrypt recording %s: %w", x.Name, err)
		}
		if bytes.HasPrefix(b, []byte(castForm)) {
			continue
		}
		out := []byte(castForm)
		n := uint64(0)
		for line := range bytes.Lines(b) {
			out = append(out, c.seal(x.Name, n, bytes.TrimSuffix(line, []byte("\n")))...)
			n++
		}
		if err := os.WriteFile(path+castPart, out, 0o600); err != nil {
			return fmt.Errorf("encrypt recording %s: %w", x.Name, err)
		}
		if err := os.Rename(path+castPart, path); err != nil {
			return fmt.Errorf("encrypt recording %s: %w", x.Name, err)
		}
	}
	return nil
}

// castPart ends the name of a file that is being written anew.
const castPart = ".part"

// seal returns a line as it is in the file of this name.
func (c *Casts) seal(name string, n uint64, line []byte) []byte {
	sealed := c.aead.Seal(nil, nil, line, castPlace(name, n)) //nolint:gosec // the nonce is random: NewGCMWithRandomNonce makes and prepends it
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(sealed))), sealed...)
}

// castPlace binds a line to its place.
func castPlace(name string, n uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte(name+"\x00"), n)
}

// open returns the recording in b, the file of this name. What is incomplete at the end is
// left out. B may be hostile.
func (c *Casts) open(name string, b []byte) (out []byte, err error) {
	b, ok := bytes.CutPrefix(b, []byte(castForm))
	if !ok {
		return nil, fmt.Errorf("recording %s: it is not encrypted by this server", name)
	}
	for n := uint64(0); len(b) >= 4; n++ {
		size := binary.BigEndian.Uint32(b)
		if uint64(size) > uint64(len(b)-4) {
			break
		}
		line, err := c.aead.Open(nil, nil, b[4:4+size], castPlace(name, n))
		if err != nil {
			return nil, fmt.Errorf("recording %s: line %d was changed, or another server's key encrypted it", name, n+1)
		}
		out = append(append(out, line...), '\n')
		b = b[4+size:]
	}
	return out, nil
}

// A Cast describes one recording.
type Cast struct {
	Name string // of the file
	At   time.Time
	Size int64
}

// A Recorder writes one recording. Its methods are called by one goroutine at a time.
type Recorder struct {
	casts *Casts
	name  string
	lines uint64
	file  *os.File
	begun time.Time
	left  int64
	rest  []byte // of a character that is not complete
	Full  bool   // the recording is as long as it may be, and what came later is not in it
}

// Record begins a recording of a sandbox's terminal.
func (c *Casts) Record(id string, cols, rows uint32) (*Recorder, error) {
	old, err := c.List(id)
	if err != nil {
		return nil, err
	}
	for len(old) >= castEach {
		if err := os.Remove(filepath.Join(c.dir, old[len(old)-1].Name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("remove an old recording: %w", err)
		}
		old = old[:len(old)-1]
	}
	now := time.Now()
	// The attack: terminals that open and flood one after the other fill the disk between
	// two rounds of [Casts.Run].
	if err := c.prune(now, castSize); err != nil {
		return nil, fmt.Errorf("make room for a recording: %w", err)
	}
	name := id + "-" + strconv.FormatInt(now.UnixMicro(), 10) + ".cast"
	if !castName().MatchString(name) {
		return nil, fmt.Errorf("record %q: %w", id, store.ErrNotFound)
	}
	f, err := os.OpenFile(filepath.Join(c.dir, name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("begin a recording: %w", err)
	}
	r := &Recorder{casts: c, name: name, file: f, begun: now, left: castSize - int64(len(castForm))}
	_, werr := f.WriteString(castForm)
	s := size(cols, rows)
	head, err := json.Marshal(map[string]any{"version": 2, "width": s.GetCols(), "height": s.GetRows(), "timestamp": now.Unix(), "env": map[string]string{"TERM": "xterm-256color"}})
	if err = errors.Join(err, werr); err == nil {
		err = r.line(head)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("begin a recording: %w", err), f.Close())
	}
	return r, nil
}

// Size notes that the window changed.
func (r *Recorder) Size(cols, rows uint32) error {
	s := size(cols, rows)
	return r.event("r", fmt.Sprintf("%dx%d", s.GetCols(), s.GetRows()))
}

// Write notes what was shown. It fails only if the disk does.
func (r *Recorder) Write(p []byte) (int, error) {
	b := append(r.rest, p...)
	keep := len(b)
	for i := 1; i < utf8.UTFMax && i <= len(b); i++ { // the end may be the middle of a character
		if utf8.RuneStart(b[len(b)-i]) {
			if !utf8.FullRune(b[len(b)-i:]) {
				keep = len(b) - i
			}
			break
		}
	}
	err := r.event("o", strings.ToValidUTF8(string(b[:keep]), "\uFFFD"))
	r.rest = slices.Clone(b[keep:])
	return len(p), err
}

func (r *Recorder) event(kind, text string) error {
	b, err := json.Marshal([]any{time.Since(r.begun).Seconds(), kind, text})
	if err != nil {
		return err
	}
	return r.line(b)
}

func (r *Recorder) line(b []byte) error {
	sealed := r.casts.seal(r.name, r.lines, b)
	// The attack: a program that floods its terminal fills the disk.
	if r.Full = r.Full || int64(len(sealed)) > r.left; r.Full {
		return nil
	}
	n, err := r.file.Write(sealed)
	r.left -= int64(n)
	r.lines++
	return err
}

// Close ends the recording.
func (r *Recorder) Close() error { return r.file.Close() }

// List returns the recordings of a sandbox, newest first. The caller has checked whose it is.
func (c *Casts) List(id string) (out []Cast, err error) {
	all, err := c.all()
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(x Cast) bool { return !strings.HasPrefix(x.Name, id+"-") }), nil
}

func (c *Casts) all() (out []Cast, err error) {
	files, err := os.ReadDir(c.dir)
	if err != nil {
		return nil, fmt.Errorf("list recordings: %w", err)
	}
	for _, f := range files {
		m := castName().FindStringSubmatch(f.Name())
		st, err := f.Info()
		if m == nil || err != nil || !st.Mode().IsRegular() {
			continue
		}
		us, err := strconv.ParseInt(m[2], 10, 64)
		if err != nil {
			continue // unreachable: digits
		}
		out = append(out, Cast{f.Name(), store.FromTime(us), st.Size()})
	}
	slices.SortFunc(out, func(a, b Cast) int { return cmp.Or(b.At.Compare(a.At), strings.Compare(a.Name, b.Name)) })
	return out, nil
}

// Open returns one recording of a sandbox.
func (c *Casts) Open(id, name string) ([]byte, error) {
	if m := castName().FindStringSubmatch(name); m == nil || m[1] != id {
		return nil, fmt.Errorf("recording %.60q of %s: %w", name, id, store.ErrNotFound)
	}
	b, err := os.ReadFile(filepath.Join(c.dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("recording %s: %w", name, store.ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("read recording %s: %w", name, err)
	}
	return c.open(name, b)
}

// Run removes old recordings until ctx is done.
func (c *Casts) Run(ctx context.Context) error {
	t := time.NewTicker(time.Hour)
	defer t.Stop()
	for {
		if err := c.prune(time.Now(), 0); err != nil {
			c.log.ErrorContext(ctx, "prune recordings of terminals", "err", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
}

// prune removes recordings that are a week old, and then the oldest until the rest fits and
// leaves room for so many bytes.
func (c *Casts) prune(now time.Time, room int64) error {
	all, err := c.all()
	if err != nil {
		return err
	}
	total := room
	var errs []error
	for _, x := range all {
		if total += x.Size; total > castAll || now.Sub(x.At) > castFor {
			if err := os.Remove(filepath.Join(c.dir, x.Name)); !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}
