package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/secret"
)

// secretsKeyVariable is the environment variable that may hold the key of secrets.
// It is no flag: a flag's value is in the list of processes.
const secretsKeyVariable = "POSTERN_SECRETS_KEY"

// keyCommandTime bounds --secrets-key-command.
const keyCommandTime = 30 * time.Second

// maxKeyText is how much of a key's file, or of what the command prints, is read.
const maxKeyText = 4096

// secretsKey returns the key under which secrets are encrypted, and what names it
// for the operator. The key is nil if the operator has set none.
func (c *Config) secretsKey(ctx context.Context) (key []byte, from string, err error) {
	text, fromVariable := os.LookupEnv(secretsKeyVariable)
	// What the server starts must not have it: the keeper, the processes of sandboxes.
	_ = os.Unsetenv(secretsKeyVariable) // fails for no such name
	if fromVariable && text == "" {
		fromVariable = false
	}
	switch {
	case c.SecretsKeyFile != "" && c.SecretsKeyCommand != "", fromVariable && (c.SecretsKeyFile != "" || c.SecretsKeyCommand != ""):
		return nil, "", fmt.Errorf("%w: give one of --secrets-key-file, --secrets-key-command and %s", errUsage, secretsKeyVariable)
	case fromVariable:
		key, err := secret.ParseKey([]byte(text))
		if err != nil {
			return nil, "", fmt.Errorf("%s: %w", secretsKeyVariable, err)
		}
		return key, secretsKeyVariable, nil
	case c.SecretsKeyFile != "":
		f, err := os.Open(c.SecretsKeyFile)
		if err != nil {
			return nil, "", fmt.Errorf("--secrets-key-file: %w", err)
		}
		b, err := io.ReadAll(io.LimitReader(f, maxKeyText))
		if err = errors.Join(err, f.Close()); err == nil {
			key, err = secret.ParseKey(b)
		}
		clear(b)
		if err != nil {
			return nil, "", fmt.Errorf("--secrets-key-file %s: %w", c.SecretsKeyFile, err)
		}
		return key, "--secrets-key-file", nil
	case c.SecretsKeyCommand != "":
		ctx, cancel := context.WithTimeout(ctx, keyCommandTime)
		defer cancel()
		cmd := exec.CommandContext(ctx, "/bin/sh", "-c", c.SecretsKeyCommand) //nolint:gosec // the operator's own
		cmd.WaitDelay = time.Second
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, os.Stderr
		err := cmd.Run()
		if err == nil {
			key, err = secret.ParseKey(out.Bytes())
		}
		clear(out.Bytes())
		if err != nil {
			return nil, "", fmt.Errorf("--secrets-key-command: %w", err)
		}
		return key, "--secrets-key-command", nil
	}
	return nil, "server.key", nil
}

// buildSecrets makes the store of secrets. server is the server's key.
func (d *daemon) buildSecrets(ctx context.Context, server []byte) error {
	key, from, err := d.conf.secretsKey(ctx)
	if err != nil {
		return err
	}
	d.secrets, err = secret.New(ctx, d.log, d.db, secret.Config{
		Server: server, Key: key, Bounds: d.bounds, Scrub: &d.scrubber,
		Changed: func(ctx context.Context, project string) { d.wall.Recheck(ctx, project) }, // the wall needs the secrets first
	})
	clear(key)
	if errors.Is(err, secret.ErrKey) {
		return fmt.Errorf(`%w
  This server was started with the key of %s. Start it with the key that it had when the secrets were created: --secrets-key-file, --secrets-key-command or %s, or none of them.
  Nothing was changed. If that key is lost, so are the values; see docs/reference/secrets.md`, err, from, secretsKeyVariable)
	}
	return err
}

// withoutCore keeps the process from leaving its memory in a file: values of secrets
// are open in it for moments. Others of the same user cannot trace it either.
func withoutCore() error {
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("switch core files off: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("switch core files off: %w", err)
	}
	return nil
}
