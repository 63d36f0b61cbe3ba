// Package lineage tells the database that a server wrote last from a copy of it: a
// restored backup, a copied directory, the clone of a virtual machine's disk.
//
// The attack, and the accident: a copy has actions that are approved and not executed.
// Where the original executes them as well, or did so after the copy was taken, each
// would be executed twice. So what was approved in a copy is asked again.
//
// Each start writes one nonce into the database and into the data directory. The two
// differ where one of them is older than the other. Beside the nonce the directory has
// what a copy of both does not take along (type place): its own inode, that of the
// database's file, and the machine. A PostgreSQL database is recognised by its cluster,
// timeline and table.
//
// What nothing here notices: the original and its copy have the same of all of these, as
// after a file system was rolled back in place. Then the checkpoint that is kept
// outside of the database is what shows it (package audit).
//
// The package must not decide what happens to a copy. It reads and writes its own two
// tables, and the directory lineage in the data directory.
package lineage

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/store"
)

// Config says where a server keeps what it compares.
type Config struct {
	// Data is the server's data directory.
	Data string
	// File is the SQLite database; empty for PostgreSQL.
	File string
	// Root is the directory below which etc and sys are; empty means "/".
	Root string
	// Original is what the caller knows without marks, and counts only where neither the
	// database nor the directory has one: that nothing was ever proposed in the database, or
	// that the directory has a checkpoint that the record continues.
	Original bool
}

// A mark is the content of lineage/mark.json in the data directory.
type mark struct {
	Server string `json:"server"` // its row in the database
	Nonce  string `json:"nonce"`
	Next   string `json:"next,omitempty"` // of a start that was interrupted between directory and database
	Place  place  `json:"place"`
}

// A place is where a server ran. An empty field is unknown, and is not compared.
type place struct {
	Directory  string `json:"directory"`            // inode of the directory lineage
	Database   string `json:"database,omitempty"`   // inode of the SQLite database
	Machine    string `json:"machine,omitempty"`    // digest of machine-id
	Hardware   string `json:"hardware,omitempty"`   // digest of the UUID that the firmware tells
	Generation string `json:"generation,omitempty"` // digest of the virtual machine's generation ID
}

// A Lineage is what a server knows about its database and directory when it starts.
type Lineage struct {
	db   *store.DB
	conf Config
	mark mark // as it was found; Server is empty where there was none
	why  string
}

// Look compares the database with the data directory. It changes nothing but the
// directory lineage, which it creates.
func Look(ctx context.Context, db *store.DB, conf Config) (*Lineage, error) {
	l := &Lineage{db: db, conf: conf}
	if err := l.look(ctx); err != nil {
		return nil, fmt.Errorf("compare the database with the data directory: %w", err)
	}
	return l, nil
}

// Copy returns how it shows that the database or the data directory is a copy, or "".
func (l *Lineage) Copy() string { return l.why }

func (l *Lineage) look(ctx context.Context) error {
	found, err := l.read()
	if err != nil {
		return err
	}
	here, err := l.place()
	if err != nil {
		return err
	}
	var row struct{ nonce, cluster string }
	var rows int
	cluster, err := l.db.Cluster(ctx, "lineage")
	if err != nil {
		return err
	}
	err = l.db.View(ctx, func(tx *store.Tx) error {
		if err := tx.One(ctx, `select count(*) from lineage`, nil, &rows); err != nil {
			return err
		}
		err := tx.One(ctx, `select nonce, cluster from lineage where server = $1`, []any{l.mark.Server}, &row.nonce, &row.cluster)
		if errors.Is(err, store.ErrNotFound) {
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}
	switch {
	case !found && rows == 0 && l.conf.Original:
		// New, or of a version without this package.
	case !found && rows == 0:
		l.why = "this data directory has never been used with it"
	case !found:
		others, err := l.othersRun(ctx)
		if err != nil {
			return err
		}
		if !others {
			l.why = "this data directory has never been used with it, and no other server is running on it"
		}
	case row.nonce == "" || row.nonce != l.mark.Nonce && row.nonce != l.mark.Next:
		l.why = "it is not the one with which this data directory was used last"
	case row.cluster != cluster:
		l.why = "it is in another PostgreSQL cluster, on another timeline, or was restored from a dump"
	default:
		l.why = l.mark.Place.differs(here)
	}
	if l.why != "" || !found {
		// A copy gets a name of its own: the original may be running on the same database.
		l.mark = mark{Server: "org_" + rand.Text()}
	}
	return nil
}

// differs returns in what a server's place is another one than it was, or "".
func (p place) differs(now place) string {
	for _, f := range []struct{ was, is, why string }{
		{p.Directory, now.Directory, "the data directory was copied: its files are not those that this server made"},
		{p.Database, now.Database, "the database's file was replaced"},
		{p.Machine, now.Machine, "it was used on another machine: /etc/machine-id differs"},
		{p.Hardware, now.Hardware, "it was used on another machine: the firmware's UUID differs"},
		{p.Generation, now.Generation, "this virtual machine is a clone, or was set back: its generation ID differs"},
	} {
		if f.was != "" && f.is != "" && f.was != f.is {
			return f.why
		}
	}
	return ""
}

// dir is the directory whose inode a copy does not have.
func (l *Lineage) dir() string { return filepath.Join(l.conf.Data, "lineage") }

func (l *Lineage) file() string { return filepath.Join(l.dir(), "mark.json") }

// read reads the mark of the last start, and reports whether there is one.
func (l *Lineage) read() (found bool, err error) {
	if err := os.Mkdir(l.dir(), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return false, err
	}
	b, err := os.ReadFile(l.file())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	// A file that was cut short or changed is no proof that this is the original.
	if json.Unmarshal(b, &l.mark) != nil || l.mark.Server == "" {
		l.mark = mark{Server: "unreadable"}
	}
	return true, nil
}

// place returns where this server runs.
func (l *Lineage) place() (p place, err error) {
	if p.Directory, err = inode(l.dir()); err != nil {
		return p, err
	}
	if l.conf.File != "" {
		if p.Database, err = inode(l.conf.File); err != nil {
			return p, err
		}
	}
	p.Machine = l.fact("etc/machine-id")
	p.Hardware = l.fact("sys/class/dmi/id/product_uuid")
	// Where QEMU has one, and the module qemu_fw_cfg is loaded. Linux shows it nowhere else.
	p.Generation = l.fact("sys/firmware/qemu_fw_cfg/by_name/etc/vmgenid_guid/raw")
	return p, nil
}

// fact returns the digest of a file that describes the machine, or "" where there is
// none. The digest, because a machine's ID is not told to others: see machine-id(5).
func (l *Lineage) fact(path string) string {
	root := l.conf.Root
	if root == "" {
		root = "/"
	}
	b, err := os.ReadFile(filepath.Join(root, path))
	if err != nil || strings.TrimSpace(string(b)) == "" {
		return ""
	}
	sum := sha256.Sum256(append([]byte("postern lineage "+path+"\n"), b...))
	return hex.EncodeToString(sum[:16])
}

// inode returns what identifies a file on its disk: the number of its inode and when
// that was made, since numbers are used again. A device's number is not part of it,
// because that may change when the machine starts.
func inode(path string) (string, error) {
	var s unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_INO|unix.STATX_BTIME, &s); err != nil {
		return "", &fs.PathError{Op: "statx", Path: path, Err: err}
	}
	if s.Mask&unix.STATX_BTIME == 0 {
		return strconv.FormatUint(s.Ino, 10), nil
	}
	return fmt.Sprintf("%d made %d.%09d", s.Ino, s.Btime.Sec, s.Btime.Nsec), nil
}

// hold is the name of the lock that a running server has on its PostgreSQL database.
func hold(server string) string { return "server " + server }

// othersRun reports whether another server is running on a PostgreSQL database. Then it is
// the original, and this server joins it.
func (l *Lineage) othersRun(ctx context.Context) (bool, error) {
	var servers []string
	err := l.db.View(ctx, func(tx *store.Tx) (err error) {
		servers, err = tx.Strings(ctx, `select server from lineage order by started_at desc limit 100`)
		return err
	})
	for _, s := range servers {
		if err != nil {
			return false, err
		}
		var h *store.Hold
		if h, err = l.db.Hold(ctx, hold(s), 0); errors.Is(err, store.ErrHeld) {
			return true, nil
		} else if err == nil {
			err = h.Close(ctx)
		}
	}
	return false, err
}

// Keep makes the database and the data directory one another's, until the next start. What
// was approved in a copy must have been dealt with before: afterwards it is the original.
// The caller runs the hold while the server runs, and closes it.
func (l *Lineage) Keep(ctx context.Context) (*store.Hold, error) {
	h, err := l.keep(ctx)
	if err != nil {
		return nil, fmt.Errorf("mark database and data directory: %w", err)
	}
	return h, nil
}

func (l *Lineage) keep(ctx context.Context) (*store.Hold, error) {
	here, err := l.place()
	if err != nil {
		return nil, err
	}
	cluster, err := l.db.Cluster(ctx, "lineage")
	if err != nil {
		return nil, err
	}
	// A former process of this server that was killed has it until its session ends.
	h, err := l.db.Hold(ctx, hold(l.mark.Server), 10*time.Second)
	if err != nil {
		return nil, err
	}
	m := l.mark
	m.Place, m.Next = here, rand.Text()
	// The directory first: after a crash in between it has both nonces.
	err = l.write(m)
	if err == nil {
		err = l.db.Update(ctx, func(tx *store.Tx) error {
			if l.conf.File != "" { // a SQLite database has one server
				if _, err := tx.ExecContext(ctx, `delete from lineage where server <> $1`, m.Server); err != nil {
					return err
				}
			}
			_, err := tx.ExecContext(ctx, `insert into lineage (server, nonce, cluster, started_at) values ($1, $2, $3, $4)
				on conflict (server) do update set nonce = excluded.nonce, cluster = excluded.cluster, started_at = excluded.started_at`,
				m.Server, m.Next, cluster, store.Time(time.Now()))
			return err
		})
	}
	if err == nil {
		m.Nonce, m.Next = m.Next, ""
		err = l.write(m)
	}
	if err != nil {
		return nil, errors.Join(err, h.Close(ctx))
	}
	l.mark = m
	return h, nil
}

func (l *Lineage) write(m mark) error {
	b, err := json.MarshalIndent(m, "", "\t")
	if err != nil {
		return err
	}
	return store.WriteFile(l.file(), append(b, '\n'), 0o600)
}

// Stamp makes a backup of a database one that every server takes for a copy, also the one
// that is running on the original: a backup that is put back between two starts would
// have the same nonce.
func Stamp(ctx context.Context, db *store.DB) error {
	err := db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `update lineage set nonce = ''`)
		return err
	})
	if err != nil {
		return fmt.Errorf("stamp backup: %w", err)
	}
	return nil
}
