package verification

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A Machine is what can be seen of the server on its own machine.
type Machine struct {
	Data  string   // the server's data directory
	Log   string   // file that the server logs to; empty means that it is not known
	Ports []uint16 // TCP ports that the server listens on
}

// FindMachine inspects the process of the server whose local socket is socket. It must run
// as root, or as the server's user. logFile is the server's log; empty means the file that
// its standard error goes to, if that is a file.
func FindMachine(data, socket, logFile string) (*Machine, error) {
	pid, err := peer(socket)
	if err != nil {
		return nil, err
	}
	m := &Machine{Data: data, Log: logFile}
	if m.Log == "" {
		for _, fd := range []string{"2", "1"} {
			path := fmt.Sprintf("/proc/%d/fd/%s", pid, fd)
			if i, err := os.Stat(path); err == nil && i.Mode().IsRegular() {
				m.Log = path
				break
			}
		}
	}
	m.Ports, err = listening(pid)
	return m, err
}

// peer returns the process that serves a local socket.
func peer(socket string) (int, error) {
	c, err := net.Dial("unix", socket) //nolint:noctx // it is on this machine
	if err != nil {
		return 0, err
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn() //nolint:forcetypeassert // unix
	if err != nil {
		return 0, err
	}
	var who *unix.Ucred
	if err2 := raw.Control(func(fd uintptr) { who, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err2 != nil || err != nil {
		return 0, errors.Join(err, err2)
	}
	return int(who.Pid), nil
}

// listening returns the TCP ports that a process listens on.
func listening(pid int) (ports []uint16, err error) {
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return nil, err
	}
	inodes := map[string]bool{}
	for _, f := range fds {
		if at, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, f.Name())); err == nil {
			if id, ok := strings.CutPrefix(at, "socket:["); ok {
				inodes[strings.TrimSuffix(id, "]")] = true
			}
		}
	}
	for _, table := range []string{"tcp", "tcp6"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		if err != nil {
			continue // without IPv6 there is no tcp6
		}
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			if len(f) < 10 || f[3] != "0A" || !inodes[f[9]] { // TCP_LISTEN
				continue
			}
			_, port, _ := strings.Cut(f[1], ":")
			if n, err := strconv.ParseUint(port, 16, 16); err == nil && !slices.Contains(ports, uint16(n)) {
				ports = append(ports, uint16(n))
			}
		}
	}
	return ports, nil
}

// addresses returns this machine's addresses, without link-local and loopback ones. In a
// sandbox a loopback address means the sandbox itself.
func addresses() (out []string, err error) {
	list, err := net.InterfaceAddrs()
	for _, a := range list {
		if p, err := netip.ParsePrefix(a.String()); err == nil && !p.Addr().IsLinkLocalUnicast() && !p.Addr().IsLoopback() {
			out = append(out, p.Addr().String())
		}
	}
	return out, err
}

// traces returns what belongs to a sandbox on this machine: processes, mounts, cgroups, and
// files in the data directory. Its logs and its record of commands are kept on purpose and left out.
func (m *Machine) traces(id string) (found []string) {
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil { // unreachable: the pattern is ours
		panic(err)
	}
	for _, p := range procs {
		if b, err := os.ReadFile(p); err == nil && bytes.Contains(b, []byte(id)) && !strings.Contains(p, "/"+strconv.Itoa(os.Getpid())+"/") {
			found = append(found, p)
		}
	}
	if b, err := os.ReadFile("/proc/self/mountinfo"); err != nil || bytes.Contains(b, []byte(id)) {
		found = append(found, "a mount")
	}
	kept := []string{filepath.Join(m.Data, "logs"), filepath.Join(m.Data, "commands")}
	for _, top := range []string{"/sys/fs/cgroup", m.Data} {
		_ = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return nil //nolint:nilerr // it was removed meanwhile
			}
			if d.IsDir() && slices.Contains(kept, path) {
				return fs.SkipDir
			}
			if strings.Contains(d.Name(), id) {
				found = append(found, path)
			}
			return nil
		})
	}
	return found
}

// maxScanned is how many bytes of one file are searched.
const maxScanned = 4 << 30

// filesWith returns, for each needle, the files of the data directory that contain it.
// Images of templates and volumes are not searched.
func (m *Machine) filesWith(needles ...string) (map[string][]string, error) {
	found := map[string][]string{}
	err := filepath.WalkDir(m.Data, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // it was removed meanwhile
		case err != nil:
			return err
		case d.IsDir() && slices.Contains([]string{"templates", "volumes"}, d.Name()):
			return fs.SkipDir
		case !d.Type().IsRegular():
			return nil
		}
		in, err := search(path, needles)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		for _, n := range in {
			found[n] = append(found[n], path)
		}
		return err
	})
	return found, err
}

// search returns the needles, of at most 1 KiB each, that a file contains.
func search(path string, needles []string) (found []string, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	const overlap = 1 << 10
	buf := make([]byte, 1<<20+overlap)
	in := io.LimitReader(f, maxScanned)
	kept := 0
	for {
		n, err := io.ReadFull(in, buf[kept:])
		text := buf[:kept+n]
		for _, needle := range needles {
			if !slices.Contains(found, needle) && bytes.Contains(text, []byte(needle)) {
				found = append(found, needle)
			}
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return found, nil
		}
		if err != nil {
			return found, err
		}
		kept = copy(buf, text[len(text)-overlap:])
	}
}

// wrongKey uses the API with a key, and returns the status. It tries the server's ports one
// after the other until one answers as the API does.
func (m *Machine) wrongKey(ctx context.Context, key string) (status int, err error) {
	// The certificate is not for 127.0.0.1, and the key is not secret.
	transport := &http.Transport{DialContext: (&net.Dialer{Timeout: 5 * time.Second}).DialContext, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true} //nolint:gosec // see above
	for _, p := range m.Ports {
		for _, scheme := range []string{"http", "https"} {
			req, err2 := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("%s://127.0.0.1:%d/v2/sandboxes", scheme, p), http.NoBody)
			if err2 != nil {
				return 0, err2
			}
			req.Header.Set("X-Api-Key", key)
			req.Header.Set("Authorization", "Bearer "+key)
			// Not over the local socket, which needs no key.
			resp, err2 := transport.RoundTrip(req)
			if err2 != nil {
				err = err2
				continue
			}
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusUnauthorized || resp.StatusCode < 300 {
				return resp.StatusCode, nil
			}
		}
	}
	return 0, errors.Join(errors.New("no port of the server answers like the API"), err)
}
