package guest

import (
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
)

// defaultPath is Debian's PATH for root. All users get it, since E2B's images have
// tools for everybody in sbin.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// errUnknownUser means that the sandbox has no user of that name.
var errUnknownUser = errors.New("invalid username")

// An account is a user in the sandbox's /etc/passwd.
type account struct {
	name string
	uid  uint32
	gid  uint32
	more []uint32 // supplementary groups
	home string
}

// lookupAccount reads the user of that name.
func lookupAccount(name string) (account, error) {
	u, err := user.Lookup(name)
	if err != nil {
		return account{}, fmt.Errorf("%w: '%s'", errUnknownUser, name)
	}
	a := account{name: u.Username, home: u.HomeDir}
	uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
	gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
	if err1 != nil || err2 != nil {
		return account{}, fmt.Errorf("%w: '%s': bad line in /etc/passwd", errUnknownUser, name)
	}
	a.uid, a.gid = uint32(uid), uint32(gid)
	if ids, err := u.GroupIds(); err == nil {
		for _, id := range ids {
			if n, err := strconv.ParseUint(id, 10, 32); err == nil {
				a.more = append(a.more, uint32(n))
			}
		}
	}
	if !filepath.IsAbs(a.home) {
		a.home = "/"
	}
	return a, nil
}

// userFiles define the sandbox's users and groups.
var userFiles = [...]string{"/etc/passwd", "/etc/group"}

// A userDB caches the user files until they change: for a short request, reading
// them takes longer than everything else.
type userDB struct {
	mu            sync.Mutex
	checked       time.Time // when the files were last found unchanged
	seen          [len(userFiles)]fileVersion
	accounts      map[string]account
	users, groups map[uint32]string // names by ID
}

// A fileVersion differs after each change of a file. Root could hide a change, but
// root could also change the guest.
type fileVersion struct {
	ino          uint64
	size         int64
	mtime, ctime unix.Timespec
}

// maxRemembered bounds each map of a userDB: a hostile process can show files of
// any number of owners.
const maxRemembered = 1024

// freshFor is how long the files are not checked again. It is shorter than the time
// in which anybody could change them and then send a request. An unknown user is
// always looked up.
const freshFor = 10 * time.Millisecond

// freshLocked clears the cache if the files have changed.
func (d *userDB) freshLocked() {
	if now := time.Now(); now.Sub(d.checked) >= freshFor {
		d.checked = now
	} else if d.accounts != nil && len(d.accounts)+len(d.users)+len(d.groups) <= maxRemembered {
		return
	}
	var now [len(userFiles)]fileVersion
	for i, name := range userFiles {
		var st unix.Stat_t
		if unix.Stat(name, &st) == nil {
			now[i] = fileVersion{st.Ino, st.Size, st.Mtim, st.Ctim}
		}
	}
	if d.accounts == nil || now != d.seen || len(d.accounts)+len(d.users)+len(d.groups) > maxRemembered {
		d.seen = now
		d.accounts, d.users, d.groups = map[string]account{}, map[uint32]string{}, map[uint32]string{}
	}
}

// account is [lookupAccount] with the cache.
func (d *userDB) account(name string) (account, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.freshLocked()
	if a, ok := d.accounts[name]; ok {
		return a, nil
	}
	a, err := lookupAccount(name)
	if err == nil {
		d.accounts[name] = a
	}
	return a, err
}

// names returns the names of a user and a group, or their numbers if they have
// none.
func (d *userDB) names(uid, gid uint32) (owner, group string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.freshLocked()
	owner, ok := d.users[uid]
	if !ok {
		owner = strconv.FormatUint(uint64(uid), 10)
		if u, err := user.LookupId(owner); err == nil {
			owner = utf8(u.Username)
		}
		d.users[uid] = owner
	}
	group, ok = d.groups[gid]
	if !ok {
		group = strconv.FormatUint(uint64(gid), 10)
		if g, err := user.LookupGroupId(group); err == nil {
			group = utf8(g.Name)
		}
		d.groups[gid] = group
	}
	return owner, group
}

// caller returns the user that an RPC names in Basic credentials without a
// password. The channel token has already proved that the request comes from the
// host, which has checked its caller.
func (s *Server) caller(h http.Header) (account, error) {
	name, err := basicUser(h.Get("Authorization"))
	if err != nil {
		return account{}, connect.NewError(connect.CodeUnauthenticated, err)
	}
	a, err := s.account(name)
	if err != nil {
		return account{}, connect.NewError(connect.CodeUnauthenticated, err)
	}
	return a, nil
}

// account returns the user of that name, or the default user if it is empty. A bound guest
// always returns the view's user.
func (s *Server) account(name string) (account, error) {
	if v := s.boundView(); v != nil {
		return v.account, nil
	}
	if name == "" {
		name = s.current().DefaultUser
	}
	return s.users.account(name)
}

// basicUser returns the user name in an Authorization header. It is empty if there
// is no header or it is of another type.
func basicUser(header string) (string, error) {
	kind, rest, _ := strings.Cut(header, " ")
	if !strings.EqualFold(kind, "Basic") {
		return "", nil
	}
	b, err := base64.StdEncoding.DecodeString(strings.TrimSpace(rest))
	if err != nil {
		return "", errors.New("the Basic credentials are not base64")
	}
	name, _, _ := strings.Cut(string(b), ":")
	return name, nil
}

// resolve makes a path of a request absolute. "~" is the user's home. Relative
// paths start at the default directory, or at the home if there is none.
func (s *Server) resolve(a account, path string) (string, error) {
	switch {
	case strings.ContainsRune(path, 0):
		return "", errors.New("the path contains a zero byte")
	case filepath.IsAbs(path):
	case path == "~" || strings.HasPrefix(path, "~/"):
		path = filepath.Join(a.home, path[1:])
	case strings.HasPrefix(path, "~"):
		return "", fmt.Errorf("the path %q names another user's home; only ~/ is known", path)
	default:
		path = filepath.Join(s.startDir(a), path)
	}
	return filepath.Clean(path), nil
}

// startDir is where relative paths and processes without a directory start.
func (s *Server) startDir(a account) string {
	if v := s.boundView(); v != nil {
		return v.dir
	}
	if d := s.current().DefaultWorkdir; d != "" {
		return d
	}
	if isDir(a.home) {
		return a.home
	}
	return "/" // like login for a user without a home
}
