package main

import (
	"fmt"
	"os"
	"strings"
)

// A place says what a command acts on, and so what POSTERN_URL means to it: it is used,
// or the command is refused. The attack, by mistake: the variable names a server, and an
// emergency stop goes to this machine's, without a word.
type place int

// The places.
const (
	// The zero place is a command that asks a server: the one that POSTERN_URL names, with a
	// credential from the environment, or this machine's, over its local socket.
	_ place = iota
	// onThisMachine is a command that works on this machine's data directory, database or
	// template cache. With POSTERN_URL it is refused.
	onThisMachine
	// onFiles is a command that asks no server of its user's: it reads files, prints help,
	// or fetches what is public. POSTERN_URL is nothing to it.
	onFiles
	// byItself is a command that reads POSTERN_URL itself, and says what it needs with it.
	byItself
)

// credentialVariables are what a server that POSTERN_URL names may be shown.
var credentialVariables = []string{sessionVariable, projectVariable, keyVariable, recoveryVariable, mcpKeyVariable}

// reachable returns an error if POSTERN_URL is set and a command at p cannot use it.
func (p place) reachable() error {
	if os.Getenv(urlVariable) == "" || p == onFiles || p == byItself {
		return nil
	}
	if p == onThisMachine {
		return fmt.Errorf("%s names a server, and this command works on this machine's data: unset %s, or run the command on the server's machine", urlVariable, urlVariable)
	}
	for _, v := range credentialVariables {
		if os.Getenv(v) != "" {
			return nil
		}
	}
	return errNoCredential()
}

// errNoCredential says that POSTERN_URL cannot be used, and what to do.
func errNoCredential() error {
	return fmt.Errorf("%s names a server, and the environment has no credential of it that this command takes: export %s=$(postern login NAME) or %s=e2b_... ; without %s the server of this machine is asked",
		urlVariable, sessionVariable, projectVariable, urlVariable)
}

// operator returns the way to this machine's server as its operator. With POSTERN_URL
// there is none: the server that it names knows no operator from elsewhere.
func operator(c Config) (*local, error) {
	if os.Getenv(urlVariable) != "" {
		return nil, errNoCredential()
	}
	return newLocal(c), nil
}

// asCaller returns the way to the server: as the person whose session the environment has,
// as the project whose key it has, and as the operator otherwise.
func asCaller(c Config) (*local, error) {
	for _, v := range []string{sessionVariable, projectVariable} {
		if strings.TrimSpace(os.Getenv(v)) == "" {
			continue
		}
		l, err := (&keyed{conf: c}).client(v)
		if err == nil && v == sessionVariable {
			l.ended = errSession
		}
		return l, err
	}
	return operator(c)
}
