// Package volume stores directories of files that outlive sandboxes and are mounted
// into one or more of them.
//
// A volume moves through these states and no others:
//
//	making ── ready ── removing ── gone
//
// The row is written before anything is created on the machine, and removed after
// everything is gone from it. [Store.Recover] completes what a crash interrupted.
//
// # Where the files are
//
// Code in a sandbox is root there and writes what it likes. It may fill the volume,
// and may leave symbolic links, pipes, devices and set-user-ID programs that attack
// the host. So each volume is a file system of its own: ext4 in a sparse file, on a
// loop device, mounted below the store's directory with nodev, nosuid and
// nosymfollow. That is an exact bound on bytes and files, even if the sandbox's
// kernel is compromised, and programs get the usual error "no space left on
// device". What was tried or considered instead:
//
//   - Project quotas need a file system created or mounted for them, which a
//     plain Debian's root file system is not.
//   - Measuring usage from time to time lets a volume fill the disk between two
//     measurements.
//   - Mounts without a path (fsmount) would need no cleaning up after a crash, but
//     gVisor's gofer finds its directories by path.
//
// Creating a volume takes 15 ms (mkfs.ext4; 1 MB of disk for a volume of 2 GiB).
// Mounting takes 4 ms and unmounting 2 ms, once for all sandboxes that use it. A
// volume stays mounted for a minute after its last use, so that the next sandbox
// needs only 0.1 ms, for the database. Deleted files free space on the host's disk
// (discard).
//
// A volume reserves its whole size. Create refuses a new volume if the host's disk
// could not hold all volumes when they are full: if the host's disk refuses a write
// of a mounted file system, that file system breaks.
//
// After kill -9 mounts and loop devices stay behind. [Store.Recover] finds them in
// the kernel's tables by the store's directory. An image is never attached to two
// loop devices, which would destroy its file system: an existing device is used
// again.
//
// # Concurrent writers
//
// Sandboxes write through their gofer, which serves the mounted directory. Callers
// with a volume's token write through [Store.Content]. Neither caches, so a write
// is visible to all others at once: content, names and attributes. There is one
// exception in gVisor: if another sandbox renames a file that a sandbox has looked
// at before, the first stat of the new name shows the old attributes.
//
// A compromised kernel of a sandbox could ask its gofer for anything that root may
// do below the mounted directory: other owners, set-user-ID bits, devices. The
// mount's flags make all of that harmless. The gofer sees no other directories of
// the host than this one, the template's and those of the sandbox's other volumes.
// Only sandboxes of the same project share a volume.
//
// Content follows no link out of the volume, opens nothing but regular files and
// directories, and replaces files atomically: an interrupted upload leaves the old
// content.
//
// The package must not decide who may use a volume, except that it belongs to one
// project. It knows nothing of sandboxes but their IDs.
package volume

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// The errors of this package. There is one for each answer that a door can give.
var (
	// ErrNotFound means that the project has no such volume.
	ErrNotFound = errors.New("volume not found")
	// ErrExists means that the name, or the path in the volume, is taken.
	ErrExists = errors.New("already exists")
	// ErrInvalid means that a request is malformed. The text names the field and
	// its limit.
	ErrInvalid = errors.New("invalid request")
	// ErrInUse means that sandboxes have the volume mounted.
	ErrInUse = errors.New("the volume is mounted in a sandbox")
	// ErrTooMany means that the project has reached its limit of volumes.
	ErrTooMany = errors.New("too many volumes")
	// ErrFull means that the volume, or the machine for a new volume, has no space
	// left.
	ErrFull = errors.New("no space left")
	// ErrNoPath means that the path does not exist in the volume.
	ErrNoPath = errors.New("path not found")
	// ErrUnsupported means that this machine cannot have volumes. The text says
	// what is missing.
	ErrUnsupported = errors.New("volumes are not supported on this machine")
)

// Config holds the settings of a [Store].
type Config struct {
	// Server is the ID of this server among those that use the database. The store
	// ignores the volumes of other servers. Empty is a valid ID.
	Server string
	// Dir holds a directory per volume. No other store may use it. It is created if
	// it does not exist.
	Dir string
	// Key is the secret that tokens of volumes are derived from, 32 bytes.
	Key []byte
	// SizeMB is the size of each new volume in mebibytes; 0 means 2048.
	SizeMB int64
	// MaxVolumes is the limit of volumes per project; 0 means 50.
	MaxVolumes int
	// ReserveMB is how many mebibytes of the host's disk stay free when all volumes
	// are full; 0 means 1024.
	ReserveMB int64
	// Wanted returns how many sandboxes of who's project need the volume with that
	// name, including paused ones, which do not have it mounted. Nil means none.
	Wanted func(ctx context.Context, who auth.Principal, name string) (int, error)
}

// A Volume is a volume of a project.
type Volume struct {
	ID      string
	Project string
	Name    string
	SizeMB  int64 // size in mebibytes
	UsedMB  int64 // mebibytes in use on the host's disk
	Created time.Time
}

// A Store keeps the volumes of all projects on this machine. It is safe for
// concurrent use.
type Store struct {
	log  *slog.Logger
	db   *store.DB
	conf Config

	// making prevents two creations from reserving the same space.
	making sync.Mutex

	mu    sync.Mutex // guards disks
	disks map[string]*disk
}

// The states of a volume's row.
const (
	making   = "making"
	ready    = "ready"
	removing = "removing"
)

// New returns a store of the volumes in conf.Dir. It starts and mounts nothing.
func New(log *slog.Logger, db *store.DB, conf Config) (*Store, error) {
	if conf.SizeMB == 0 {
		conf.SizeMB = 2048
	}
	if conf.MaxVolumes == 0 {
		conf.MaxVolumes = 50
	}
	if conf.ReserveMB == 0 {
		conf.ReserveMB = 1024
	}
	const most = 1 << 30
	switch {
	case conf.Dir == "":
		return nil, errors.New("no directory for volumes")
	case len(conf.Key) != sha256.Size:
		return nil, fmt.Errorf("key of volumes has %d bytes, want %d", len(conf.Key), sha256.Size)
	case conf.SizeMB < 16 || conf.SizeMB > most:
		return nil, fmt.Errorf("size of volumes is %d MiB, under 16 or too large", conf.SizeMB)
	case conf.MaxVolumes < 0 || conf.ReserveMB < 0:
		return nil, errors.New("MaxVolumes and ReserveMB must not be negative")
	}
	if err := os.MkdirAll(conf.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory for volumes: %w", err)
	}
	// The kernel's table of mounts has paths without symbolic links.
	dir, err := filepath.Abs(conf.Dir)
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err != nil {
		return nil, fmt.Errorf("find directory for volumes: %w", err)
	}
	conf.Dir = dir
	return &Store{log: log, db: db, conf: conf, disks: map[string]*disk{}}, nil
}

// namePattern is E2B's, with a limit on the length.
var namePattern = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-zA-Z0-9_-]{1,128}$`) })

// idPattern is strict because IDs become directory names.
var idPattern = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^vol_[A-Z2-7]{26}$`) })

// Create makes an empty volume for who's project.
func (s *Store) Create(ctx context.Context, who auth.Principal, name string) (Volume, error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return Volume{}, err
	}
	if !namePattern().MatchString(name) {
		return Volume{}, fmt.Errorf("%w: name: want 1 to 128 letters, digits, _ and -", ErrInvalid)
	}
	s.making.Lock()
	defer s.making.Unlock()
	v := Volume{ID: "vol_" + rand.Text(), Project: who.Project, Name: name, SizeMB: s.conf.SizeMB, Created: time.Now().UTC().Truncate(time.Microsecond)}
	err := s.db.Update(ctx, func(tx *store.Tx) error {
		var n int
		if err := tx.One(ctx, `select count(*) from volume where project_id = $1`, []any{who.Project}, &n); err != nil {
			return err
		}
		if n >= s.conf.MaxVolumes {
			return fmt.Errorf("%w: the project has %d, which is the limit", ErrTooMany, n)
		}
		if err := s.room(ctx, tx, v.SizeMB); err != nil {
			return err
		}
		fresh, err := tx.Changed(ctx, `insert into volume (id, project_id, name, state, size_mb, created_at, server_id) values ($1, $2, $3, $4, $5, $6, $7) on conflict do nothing`,
			v.ID, v.Project, v.Name, making, v.SizeMB, store.Time(v.Created), s.conf.Server)
		if err == nil && !fresh {
			return fmt.Errorf("volume with name '%s' %w", name, ErrExists)
		}
		return err
	})
	if err != nil {
		return Volume{}, fmt.Errorf("create volume: %w", err)
	}
	// Complete or undo what was begun, even if the caller disconnects.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	if err := s.make(ctx, v); err != nil {
		return Volume{}, errors.Join(fmt.Errorf("create volume %s: %w", name, err), s.erase(ctx, v.ID))
	}
	err = s.db.Update(ctx, func(tx *store.Tx) error {
		if _, err := tx.ExecContext(ctx, `update volume set state = $1 where id = $2 and state = $3`, ready, v.ID, making); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.VolumeCreate, v.ID, audit.Fields{"name": v.Name, "size_mb": strconv.FormatInt(v.SizeMB, 10)})
	})
	if err != nil {
		return Volume{}, errors.Join(fmt.Errorf("create volume %s: %w", name, err), s.erase(ctx, v.ID))
	}
	return v, nil
}

// room returns an error that wraps [ErrFull] if the disk cannot hold another
// volume.
func (s *Store) room(ctx context.Context, tx *store.Tx, sizeMB int64) error {
	rows, err := tx.QueryContext(ctx, `select id, size_mb from volume where state <> $1 and server_id = $2`, removing, s.conf.Server)
	if err != nil {
		return err
	}
	defer rows.Close()
	promised := sizeMB
	for rows.Next() {
		var id string
		var size int64
		if err := rows.Scan(&id, &size); err != nil {
			return err
		}
		promised += max(0, size-s.used(id))
	}
	if err := rows.Err(); err != nil {
		return err
	}
	free, err := freeMB(s.conf.Dir)
	if err != nil {
		return err
	}
	if free-s.conf.ReserveMB < promised {
		return fmt.Errorf("%w: the machine's disk has %d MiB free; full volumes would need %d MiB, and %d MiB must stay free: delete some volumes, or make new ones smaller with --volume-size",
			ErrFull, free, promised, s.conf.ReserveMB)
	}
	return nil
}

// List returns the volumes of who's project, oldest first.
func (s *Store) List(ctx context.Context, who auth.Principal) ([]Volume, error) {
	var out []Volume
	err := s.db.View(ctx, func(tx *store.Tx) error {
		rows, err := tx.QueryContext(ctx, `select id, project_id, name, size_mb, created_at from volume where project_id = $1 and state = $2 and server_id = $3 order by created_at, id`, who.Project, ready, s.conf.Server)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var v Volume
			var at int64
			if err := rows.Scan(&v.ID, &v.Project, &v.Name, &v.SizeMB, &at); err != nil {
				return err
			}
			v.Created = store.FromTime(at)
			out = append(out, v)
		}
		return rows.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("list volumes: %w", err)
	}
	for i := range out {
		out[i].UsedMB = s.used(out[i].ID)
	}
	return out, nil
}

// Get returns a volume of who's project.
func (s *Store) Get(ctx context.Context, who auth.Principal, id string) (v Volume, err error) {
	err = s.db.View(ctx, func(tx *store.Tx) error {
		v, err = s.get(ctx, tx, who.Project, "id", id)
		return err
	})
	if err != nil {
		return Volume{}, fmt.Errorf("get volume: %w", err)
	}
	v.UsedMB = s.used(v.ID)
	return v, nil
}

// get reads a ready volume by its ID or name.
func (s *Store) get(ctx context.Context, tx *store.Tx, project, column, value string) (Volume, error) {
	where := map[string]string{"id": `id = $1`, "name": `name = $1`}[column]
	var v Volume
	var at int64
	err := tx.One(ctx, `select id, project_id, name, size_mb, created_at from volume where `+where+` and project_id = $2 and state = $3 and server_id = $4`,
		[]any{value, project, ready, s.conf.Server}, &v.ID, &v.Project, &v.Name, &v.SizeMB, &at)
	if errors.Is(err, store.ErrNotFound) {
		return Volume{}, fmt.Errorf("%w: %s", ErrNotFound, value)
	}
	v.Created = store.FromTime(at)
	return v, err
}

// Delete removes a volume and its files. It refuses if a sandbox uses the volume,
// or is paused and needs it to be resumed.
func (s *Store) Delete(ctx context.Context, who auth.Principal, id string) error {
	if err := auth.Need(who, auth.Owner); err != nil {
		return err
	}
	v, err := s.Get(ctx, who, id)
	if err != nil {
		return fmt.Errorf("delete volume: %w", err)
	}
	if s.conf.Wanted != nil {
		n, err := s.conf.Wanted(ctx, who, v.Name)
		if err != nil {
			return fmt.Errorf("delete volume: find sandboxes that want it: %w", err)
		}
		if n > 0 {
			return fmt.Errorf("delete volume: %w or needed by a paused one (%d sandboxes); end them first", ErrInUse, n)
		}
	}
	err = s.db.Update(ctx, func(tx *store.Tx) error {
		// The row is changed before the uses are counted. So a concurrent Mount is
		// either counted here or finds the volume gone.
		moved, err := tx.Changed(ctx, `update volume set state = $1, name = id where id = $2 and state = $3`, removing, id, ready)
		if err != nil {
			return err
		}
		if !moved {
			return fmt.Errorf("%w: %s", ErrNotFound, id)
		}
		var n int
		if err := tx.One(ctx, `select count(*) from volume_use where volume_id = $1`, []any{id}, &n); err != nil {
			return err
		}
		if n > 0 {
			return fmt.Errorf("%w (%d sandboxes); end them first", ErrInUse, n)
		}
		return audit.Append(ctx, tx, who, audit.VolumeDelete, id, audit.Fields{"name": v.Name})
	})
	if err != nil {
		return fmt.Errorf("delete volume: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	if err := s.erase(ctx, id); err != nil {
		// It is gone for everybody; the next start of the server tries again.
		s.log.WarnContext(ctx, "remove the files of a volume", "volume", id, "err", err)
	}
	return nil
}

// erase removes a volume from this machine, and then its row.
func (s *Store) erase(ctx context.Context, id string) error {
	if err := s.discard(id); err != nil {
		return err
	}
	return s.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `delete from volume where id = $1 and state <> $2`, id, ready)
		return err
	})
}

// Token returns the credential for the content of volume id only. It is derived
// from the key, so nothing is stored, and is valid as long as the volume exists.
func (s *Store) Token(id string) auth.Secret {
	m := hmac.New(sha256.New, s.conf.Key)
	m.Write([]byte("postern volume content\x00" + id))
	return auth.Secret("pvt_" + hex.EncodeToString(m.Sum(nil)))
}

// CheckToken returns the volume id if token is its credential. Otherwise its error
// wraps [auth.ErrUnauthenticated], or [ErrNotFound] if the token is right but the
// volume has been deleted.
func (s *Store) CheckToken(ctx context.Context, id string, token auth.Secret) (Volume, error) {
	if !hmac.Equal([]byte(s.Token(id).Reveal()), []byte(token.Reveal())) {
		return Volume{}, fmt.Errorf("token of volume: %w", auth.ErrUnauthenticated)
	}
	var v Volume
	err := s.db.View(ctx, func(tx *store.Tx) error {
		err := tx.One(ctx, `select id, project_id, name from volume where id = $1 and state = $2 and server_id = $3`, []any{id, ready, s.conf.Server}, &v.ID, &v.Project, &v.Name)
		if errors.Is(err, store.ErrNotFound) {
			return fmt.Errorf("%w: %s", ErrNotFound, id)
		}
		return err
	})
	return v, err
}

// Check returns an error that wraps [ErrInvalid] unless a sandbox of the project
// may have these mounts and the volumes exist.
func (s *Store) Check(ctx context.Context, project string, wants []Want) error {
	if err := CheckWants(wants); err != nil || len(wants) == 0 {
		return err
	}
	return s.db.View(ctx, func(tx *store.Tx) error {
		for i, w := range wants {
			_, err := s.get(ctx, tx, project, "name", w.Name)
			if errors.Is(err, ErrNotFound) {
				return fmt.Errorf("%w: volumeMounts[%d]: volume '%s' not found", ErrInvalid, i, w.Name)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// A Mount is a mounted volume.
type Mount struct {
	Volume string // id
	Source string // absolute, on the host
}

// Mount makes the volume that the project calls name ready for a sandbox, until
// [Store.Unmounted] is called with the sandbox's ID. Mounting it again for the same
// sandbox changes nothing.
func (s *Store) Mount(ctx context.Context, project, sandbox, name string) (Mount, error) {
	var v Volume
	var fresh bool
	err := s.db.Update(ctx, func(tx *store.Tx) error {
		var err error
		if v, err = s.get(ctx, tx, project, "name", name); err != nil {
			return err
		}
		// This locks the row. A concurrent Delete has either been committed, so
		// that there is no volume, or will count this use.
		held, err := tx.Changed(ctx, `update volume set state = state where id = $1 and state = $2`, v.ID, ready)
		if err != nil {
			return err
		}
		if !held {
			return fmt.Errorf("%w: %s", ErrNotFound, name)
		}
		fresh, err = tx.Changed(ctx, `insert into volume_use (sandbox_id, volume_id) values ($1, $2) on conflict do nothing`, sandbox, v.ID)
		if err != nil || !fresh {
			return err
		}
		who := auth.Principal{Kind: auth.Sandbox, ID: sandbox, Project: project}
		return audit.Append(ctx, tx, who, audit.VolumeMount, v.ID, audit.Fields{"name": v.Name})
	})
	if err != nil {
		return Mount{}, fmt.Errorf("mount volume: %w", err)
	}
	d, err := s.open(ctx, v.ID)
	if err == nil {
		err = d.use(sandbox)
		d.release()
	}
	if err != nil {
		if fresh {
			err = errors.Join(err, s.forget(context.WithoutCancel(ctx), sandbox, v.ID))
		}
		return Mount{}, fmt.Errorf("mount volume %s: %w", name, err)
	}
	return Mount{Volume: v.ID, Source: d.files()}, nil
}

// Unmounted ends the use of all volumes by a sandbox. It is not an error if there
// was none.
func (s *Store) Unmounted(ctx context.Context, sandbox string) error {
	if err := s.forget(ctx, sandbox, ""); err != nil {
		return fmt.Errorf("release volumes: %w", err)
	}
	for _, d := range s.all() {
		d.unuse(sandbox)
	}
	return nil
}

// forget removes the rows of a sandbox's use, of one volume or of all.
func (s *Store) forget(ctx context.Context, sandbox, volume string) error {
	return s.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `delete from volume_use where sandbox_id = $1 and ($2 = '' or volume_id = $2)`, sandbox, volume)
		return err
	})
}

// Recover deals with the volumes of a previous process of this server. It completes
// creations and removals, and takes over the mounts that sandboxes still use. Alive
// are the IDs of the running sandboxes; uses by others have ended.
func (s *Store) Recover(ctx context.Context, alive []string) error {
	var cut []string
	using := map[string][]string{} // sandboxes by volume
	var all []string
	err := s.db.Update(ctx, func(tx *store.Tx) error {
		rows, err := tx.QueryContext(ctx, `select v.id, v.state, coalesce(u.sandbox_id, '') from volume v left join volume_use u on u.volume_id = v.id
			where v.server_id = $1`, s.conf.Server)
		if err != nil {
			return err
		}
		defer rows.Close()
		var ended []string
		for rows.Next() {
			var id, state, sandbox string
			if err := rows.Scan(&id, &state, &sandbox); err != nil {
				return err
			}
			switch {
			case state != ready:
				cut = append(cut, id)
			case slices.Contains(alive, sandbox):
				using[id] = append(using[id], sandbox)
			case sandbox != "":
				ended = append(ended, sandbox)
			}
			all = append(all, id)
		}
		if err := rows.Err(); err != nil {
			return err
		}
		for _, sandbox := range ended {
			if _, err := tx.ExecContext(ctx, `delete from volume_use where sandbox_id = $1`, sandbox); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("recover volumes: %w", err)
	}
	var errs []error
	for _, id := range cut {
		errs = append(errs, s.erase(ctx, id))
	}
	mounted, err := mountsBelow(s.conf.Dir)
	if err != nil {
		return errors.Join(append(errs, fmt.Errorf("recover volumes: %w", err))...)
	}
	for _, id := range mounted {
		if len(using[id]) == 0 {
			errs = append(errs, s.unmount(id))
		}
	}
	for id, sandboxes := range using {
		d, err := s.open(ctx, id)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for _, sb := range sandboxes {
			errs = append(errs, d.use(sb))
		}
		d.release()
	}
	s.strays(ctx, all)
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("recover volumes: %w", err)
	}
	return nil
}

// strays logs the directories of unknown volumes. They are not removed, since the
// database may be an older copy.
func (s *Store) strays(ctx context.Context, known []string) {
	es, err := os.ReadDir(s.conf.Dir)
	if err != nil {
		s.log.WarnContext(ctx, "list volumes' directories", "err", err)
	}
	for _, e := range es {
		if idPattern().MatchString(e.Name()) && !slices.Contains(known, e.Name()) {
			s.log.WarnContext(ctx, "a directory belongs to no volume in the database; it is not removed", "dir", filepath.Join(s.conf.Dir, e.Name()))
		}
	}
}

// idle is how long a volume stays mounted after its last use.
const idle = time.Minute

// Run unmounts volumes that nothing has used for a minute, until ctx is done.
func (s *Store) Run(ctx context.Context) error {
	t := time.NewTicker(idle / 4)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
			s.sweep(ctx, idle)
		}
	}
}

// Close unmounts the volumes that are not in use. The others stay mounted, and the
// next [Store.Recover] takes them over.
func (s *Store) Close(ctx context.Context) { s.sweep(ctx, 0) }

// sweep unmounts the volumes that have not been used for age.
func (s *Store) sweep(ctx context.Context, age time.Duration) {
	for _, d := range s.all() {
		if err := d.rest(age); err != nil {
			s.log.WarnContext(ctx, "unmount an idle volume", "volume", d.id, "err", err)
		}
	}
}

// all returns the current disks.
func (s *Store) all() []*disk {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.disks))
}
