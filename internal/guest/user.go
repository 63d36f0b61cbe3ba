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

	"connectrpc.com/connect"
)

// defaultPath is what Debian gives to root. It is given to everybody, since
// E2B's images keep tools for all in sbin.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// errUnknownUser means that the sandbox has no such user.
var errUnknownUser = errors.New("unknown user")

// An account is a user of the sandbox, as its /etc/passwd says now.
type account struct {
	name string
	uid  uint32
	gid  uint32
	more []uint32 // supplementary groups
	home string
}

// lookupAccount returns the user of that name.
func lookupAccount(name string) (account, error) {
	u, err := user.Lookup(name)
	if err != nil {
		return account{}, fmt.Errorf("%w %q", errUnknownUser, name)
	}
	a := account{name: u.Username, home: u.HomeDir}
	uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
	gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
	if err1 != nil || err2 != nil {
		return account{}, fmt.Errorf("%w %q: bad line in /etc/passwd", errUnknownUser, name)
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

// caller returns the user that an RPC asks to act as. The name comes in Basic
// credentials without a password: the channel has already said that the host
// asks, and the host that its caller may.
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

// account returns the user of that name, the default one if it is empty.
func (s *Server) account(name string) (account, error) {
	if name == "" {
		name = s.current().DefaultUser
	}
	return lookupAccount(name)
}

// basicUser returns the user name of an Authorization header, empty if there
// is no header or it is of another kind.
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

// resolve makes a path of a request absolute: "~" is the user's home, what is
// relative starts at the default directory or else the home.
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
	if d := s.current().DefaultWorkdir; d != "" {
		return d
	}
	if isDir(a.home) {
		return a.home
	}
	return "/" // as login does for a user without a home
}
