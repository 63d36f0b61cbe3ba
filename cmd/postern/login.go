package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"postern/internal/api"
)

// sessionVariable is the variable with a person's session.
const sessionVariable = "POSTERN_SESSION"

const personalHelp = `
Without more, the server in --data is asked over its local socket, as its
operator. As a person, also on another machine:

  export POSTERN_URL=https://postern.example.com
  export POSTERN_SESSION=$(postern login anna)`

// A personal is the way of a command to the server as a person: with a session,
// if the environment has one, and over the local socket otherwise.
type personal struct{ keyed }

func (p *personal) flags(fs *pflag.FlagSet) { p.conf.location(fs) }

// onServer is [onServer] with p's flags.
func (p *personal) onServer(f func(ctx context.Context, l *local, args []string, out *output) error) runner {
	return onServer(&p.conf, f)
}

func loginCommand() *command {
	var p personal
	var stepUp bool
	return &command{
		use: "login NAME", at: byItself, short: "sign in as a person and print the session",
		long: `
Asks for the password, and for a code of the authenticator app (or a recovery
code) if the account has a second factor, and prints the token of a session to
standard output. It is that person, for twelve hours: keep it in the environment
of a shell, and end it with "postern logout".

  export POSTERN_URL=https://postern.example.com   # if it is another machine
  export POSTERN_SESSION=$(postern login anna)
  postern person list

Where policy asks for a fresh second factor:

  postern login --step-up

A passkey is a browser's: sign in at the console with it.`,
		flags: func(fs *pflag.FlagSet) {
			p.flags(fs)
			fs.BoolVar(&stepUp, "step-up", false, "prove a second factor again in the session that there is")
		},
		run: func(ctx context.Context, args []string, out *output) error {
			if stepUp {
				if err := noArgs(args); err != nil {
					return err
				}
				l, err := p.client(sessionVariable) // of which the proof is
				if err != nil {
					return err
				}
				return proveAgain(ctx, l, out)
			}
			name, err := oneArg(args, "NAME")
			if err != nil {
				return err
			}
			l, err := p.open()
			if err != nil {
				return err
			}
			return l.signIn(ctx, name, out)
		},
	}
}

// open returns the way to the server of somebody who shows nothing yet.
func (p *personal) open() (*local, error) {
	if os.Getenv(urlVariable) == "" {
		return newLocal(p.conf), nil
	}
	return p.remote("")
}

func (l *local) signIn(ctx context.Context, name string, out *output) error {
	in := bufio.NewReader(os.Stdin)
	password, err := secretLine(in, "Password: ")
	if err != nil {
		return err
	}
	code, err := secretLine(in, "Code (empty without a second factor): ")
	if err != nil {
		return err
	}
	_, s, err := l.api.Session.SignIn(ctx, api.SignIn{Name: name, Password: password, Code: code})
	if err != nil {
		return l.explain(err)
	}
	fmt.Fprintf(os.Stderr, "Signed in as %s until %s.\n", name, s.ExpiresAt.Local().Format("2006-01-02 15:04"))
	_, err = fmt.Fprintln(out, s.Token)
	return err
}

func proveAgain(ctx context.Context, l *local, out *output) error {
	code, err := secretLine(bufio.NewReader(os.Stdin), "Code: ")
	if err != nil {
		return err
	}
	if _, err := l.api.Session.StepUp(ctx, code); err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, "It counts for ten minutes.")
	return err
}

func logoutCommand() *command {
	var p personal
	return &command{
		use: "logout", short: "end the session in POSTERN_SESSION",
		long: `
Ends the session that "postern login" began. A session also ends by itself after
twelve hours, and when its person's role or password changes.`,
		flags: p.flags,
		run: func(ctx context.Context, args []string, out *output) error {
			if err := noArgs(args); err != nil {
				return err
			}
			l, err := p.client(sessionVariable)
			if err != nil {
				return err
			}
			l.ended = errSession
			if err := l.api.Session.SignOut(ctx); err != nil {
				return l.explain(err)
			}
			_, err = fmt.Fprintln(out, "Signed out.")
			return err
		},
	}
}

// secretLine asks for a line at the terminal, which does not show it, or takes
// the next one of what is piped in.
func secretLine(in *bufio.Reader, prompt string) (string, error) {
	fd := int(os.Stdin.Fd())
	state, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err == nil {
		fmt.Fprint(os.Stderr, prompt)
		quiet := *state
		quiet.Lflag &^= unix.ECHO
		if err := unix.IoctlSetTermios(fd, unix.TCSETS, &quiet); err != nil {
			return "", fmt.Errorf("hide what is typed: %w", err)
		}
		defer func() {
			_ = unix.IoctlSetTermios(fd, unix.TCSETS, state) // it was taken a moment ago
			fmt.Fprintln(os.Stderr)
		}()
	}
	line, err := in.ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return "", fmt.Errorf("read what is typed: %w", err)
	}
	return strings.TrimRight(line, "\r\n"), nil
}
