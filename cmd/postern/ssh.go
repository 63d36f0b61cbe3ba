package main

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/spf13/pflag"
	"golang.org/x/crypto/ssh"
)

// sshSuffix ends the names of sandboxes in the configuration of OpenSSH.
const sshSuffix = ".postern"

// templateUser is the SSH user that stands for the template's account.
const templateUser = "default"

const sshHelp = `
Opens a shell in a sandbox, or runs a command there, with the OpenSSH client of
this machine. The sandbox needs no SSH server: this command is one, on a pipe to
the client. Nothing listens on a port. Host key and client key are made for the
session and removed at its end. Who may use the sandbox is decided as for all
other commands, by the local socket or a project's key.

With a block in ~/.ssh/config, ssh, scp, sftp, rsync and editors work by name:

  postern ssh --print-config >> ~/.ssh/config
  ssh ID.postern
  scp report.csv ID.postern:
  rsync -a src/ ID.postern:src/

rsync has to be installed in the sandbox, too. Ports of the sandbox can be
forwarded (-L); others cannot be reached, and -R is refused.`

// An sshTool is the ssh and the forward command with their flags.
type sshTool struct {
	conf Config

	user        string
	stdio       bool
	printConfig bool
	session     string   // directory with the keys of a session
	forward     []string // as -L of OpenSSH
}

func sshCommand() *command {
	s := &sshTool{}
	c := &s.conf
	return &command{
		use: "ssh SANDBOX [--] [COMMAND...]", short: "open a shell in a sandbox with OpenSSH; scp, rsync and editors", long: sshHelp, foreign: true,
		example: "postern ssh ID\npostern ssh ID -- python3 --version\npostern ssh --print-config >> ~/.ssh/config",
		flags: func(fs *pflag.FlagSet) {
			c.location(fs)
			fs.StringVar(&s.user, "user", "", "`name` of the account in the sandbox (default: the template's)")
			fs.StringArrayVarP(&s.forward, "local", "L", nil, "forward a `port` as ssh -L does: PORT:localhost:PORT; may be repeated")
			fs.BoolVar(&s.stdio, "stdio", false, "be the SSH server, on standard input and output (for ProxyCommand)")
			fs.BoolVar(&s.printConfig, "print-config", false, "print a block for ~/.ssh/config")
			fs.StringVar(&s.session, "session", "", "`directory` with the keys of the session")
			_ = fs.MarkHidden("session") // it was declared a line above
		},
		complete: sandboxIDs(c), run: onServer(c, s.ssh),
	}
}

func (s *sshTool) ssh(ctx context.Context, l *local, args []string, out *output) error {
	if s.printConfig {
		block, err := s.configBlock()
		if err != nil {
			return err
		}
		_, err = fmt.Fprint(out, block)
		return err
	}
	if len(args) > 1 && args[1] == "--" {
		args = append(args[:1:1], args[2:]...)
	}
	if len(args) == 0 {
		return fmt.Errorf("%w: want the ID of a sandbox", errUsage)
	}
	id := strings.TrimSuffix(args[0], sshSuffix)
	if s.stdio {
		if len(args) > 1 {
			return fmt.Errorf("%w: --stdio takes no command", errUsage)
		}
		config, err := s.serverConfig()
		if err != nil {
			return err
		}
		d, err := l.inside(ctx, id, "")
		if err != nil {
			return err
		}
		return d.serveSSH(ctx, config, os.Stdin, os.Stdout)
	}
	if _, err := l.sandbox(ctx, id); err != nil { // OpenSSH would say only that the connection closed
		return err
	}
	return s.client(ctx, id, args[1:], out)
}

// client runs OpenSSH with keys of its own, and with this program as its way to
// the sandbox.
func (s *sshTool) client(ctx context.Context, id string, command []string, out *output) (err error) {
	program, err := exec.LookPath("ssh")
	if err != nil {
		return errors.New("there is no ssh on this machine: install OpenSSH's client (Debian: openssh-client), or use postern sandbox shell")
	}
	dir, err := os.MkdirTemp("", "postern-ssh-") // mode 0700
	if err != nil {
		return fmt.Errorf("make directory for the session's keys: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := writeKeys(dir); err != nil {
		return err
	}
	proxy, err := s.proxyCommand("--session", dir)
	if err != nil {
		return err
	}
	path := func(name string) string { return `"` + percents(filepath.Join(dir, name)) + `"` }
	args := []string{
		"-F", "none", "-o", "ProxyCommand=" + proxy + " " + shellQuote(id), "-o", "IdentityFile=" + path("client"), "-o", "IdentitiesOnly=yes", "-o", "IdentityAgent=none",
		"-o", "UserKnownHostsFile=" + path("known_hosts"), "-o", "GlobalKnownHostsFile=none", "-o", "StrictHostKeyChecking=yes", "-o", "HostKeyAlias=postern",
		"-o", "PasswordAuthentication=no", "-o", "KbdInteractiveAuthentication=no", "-o", "LogLevel=ERROR", "-l", cmp.Or(s.user, templateUser),
	}
	for _, f := range s.forward {
		args = append(args, "-L", f)
	}
	args = append(append(args, id+sshSuffix), command...)
	cmd := exec.CommandContext(ctx, program, args...)                   //nolint:gosec // the arguments are the user's own and pass no shell
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, out.Writer, os.Stderr // a terminal stays one
	if err := cmd.Run(); err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() > 0 {
			return exitError(exit.ExitCode())
		}
		return fmt.Errorf("run ssh: %w", err)
	}
	return nil
}

// writeKeys makes the two key pairs of a session.
func writeKeys(dir string) error {
	write := func(name string) (ssh.PublicKey, error) {
		public, private, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			return nil, err
		}
		block, err := ssh.MarshalPrivateKey(private, "")
		if err != nil {
			return nil, err
		}
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600); err != nil {
			return nil, err
		}
		return ssh.NewPublicKey(public)
	}
	host, err := write("host")
	if err != nil {
		return fmt.Errorf("make host key: %w", err)
	}
	client, err := write("client")
	if err != nil {
		return fmt.Errorf("make client key: %w", err)
	}
	return errors.Join(
		os.WriteFile(filepath.Join(dir, "known_hosts"), append([]byte("postern "), ssh.MarshalAuthorizedKey(host)...), 0o600),
		os.WriteFile(filepath.Join(dir, "client.pub"), ssh.MarshalAuthorizedKey(client), 0o600),
	)
}

// serverConfig is that of the SSH server. With a session it has the session's
// keys. Without one, its client is whoever started this program, and both are on
// a pipe that nobody else has: there is nothing to prove, and the host key is
// new each time.
func (s *sshTool) serverConfig() (*ssh.ServerConfig, error) {
	config := &ssh.ServerConfig{ServerVersion: "SSH-2.0-postern", MaxAuthTries: 3}
	if s.session == "" {
		_, private, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			return nil, err
		}
		signer, err := ssh.NewSignerFromSigner(private)
		if err != nil {
			return nil, err
		}
		config.NoClientAuth = true
		config.AddHostKey(signer)
		return config, nil
	}
	b, err := os.ReadFile(filepath.Join(s.session, "host"))
	if err != nil {
		return nil, fmt.Errorf("read the session's host key: %w", err)
	}
	signer, err := ssh.ParsePrivateKey(b)
	if err != nil {
		return nil, fmt.Errorf("read the session's host key: %w", err)
	}
	config.AddHostKey(signer)
	if b, err = os.ReadFile(filepath.Join(s.session, "client.pub")); err != nil {
		return nil, fmt.Errorf("read the session's client key: %w", err)
	}
	client, _, _, _, err := ssh.ParseAuthorizedKey(b)
	if err != nil {
		return nil, fmt.Errorf("read the session's client key: %w", err)
	}
	config.PublicKeyCallback = func(_ ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
		if string(key.Marshal()) != string(client.Marshal()) {
			return nil, errors.New("this key is not the session's")
		}
		return &ssh.Permissions{}, nil
	}
	return config, nil
}

// configBlock is for ~/.ssh/config.
func (s *sshTool) configBlock() (string, error) {
	proxy, err := s.proxyCommand()
	if err != nil {
		return "", err
	}
	return `# Sandboxes of Postern: ssh ID` + sshSuffix + `. The server is on a pipe to this machine's own
# postern program, which makes a host key for each connection.
Host *` + sshSuffix + `
    ProxyCommand ` + proxy + ` %n
    User ` + cmp.Or(s.user, templateUser) + `
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    GlobalKnownHostsFile /dev/null
    LogLevel ERROR
`, nil
}

// proxyCommand is this command again, as the SSH server, without the sandbox.
// The environment, which may have a project's key, is handed on by OpenSSH.
func (s *sshTool) proxyCommand(flags ...string) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find own program: %w", err)
	}
	words := append([]string{self, "ssh", "--stdio"}, flags...)
	for _, f := range []struct{ name, value string }{{"--data", s.conf.Data}, {"--config", s.conf.ConfigFile}} {
		if f.value == "" {
			continue
		}
		// An editor starts it in another directory.
		path, err := filepath.Abs(f.value)
		if err != nil {
			return "", err
		}
		words = append(words, f.name, path)
	}
	for i, w := range words {
		words[i] = percents(shellQuote(w))
	}
	return strings.Join(words, " "), nil
}

// percents keeps OpenSSH from replacing parts of s.
func percents(s string) string { return strings.ReplaceAll(s, "%", "%%") }
