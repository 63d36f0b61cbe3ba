package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"postern/internal/api"
	"postern/internal/secret"
)

const openPlaceHelp = `
The value of a secret goes into the header fields that the secret lists. Some
APIs read a credential elsewhere: a token endpoint in a form, a bot's API in the
path. "secret open" opens one such place, for one method and path of one host.
The placeholder must be all of the place; anywhere else it stays text.

  header:FIELD                          one more header field, at every host
  form:FIELD   METHOD HOST/PATH         a field of a form
  json:/FIELD  METHOD HOST/PATH         a text in JSON, by JSON Pointer
  query:NAME   METHOD HOST/PATH         a parameter of the query
  cookie:NAME  METHOD HOST/PATH         a cookie
  path         METHOD HOST/A{secret}/B  one segment of the path

A * at the end of a path stands for anything. Whoever reads the place at the host
can give the value back to the sandbox: never open what a model, a log or a page
shows. When a request failed because its placeholder stayed text, the record and
the server's log name the command (postern network log).`

// printPlaceWarning says what an opened place means.
func printPlaceWarning() {
	fmt.Fprintln(os.Stderr, "The value now leaves in this place. A host that shows or repeats what it reads there gives the value to the sandbox.")
}

// placeArgs returns the secret's name and the place that the arguments name. A header
// field is returned instead of a place.
func placeArgs(args []string) (name, header string, p api.SecretPlace, err error) {
	if len(args) == 2 {
		if field, ok := strings.CutPrefix(args[1], "header:"); ok && field != "" {
			return args[0], field, p, nil
		}
	}
	if len(args) != 4 {
		return "", "", p, fmt.Errorf("%w: want NAME header:FIELD, or NAME SPOT METHOD HOST/PATH, such as login form:client_secret POST login.example.com/oauth/token", errUsage)
	}
	place, err := secret.ParsePlace(strings.Join(args[1:], " "))
	if err != nil {
		return "", "", p, fmt.Errorf("%w: %w", errUsage, err)
	}
	return args[0], "", api.SecretPlace{Host: place.Host, Method: strings.ToUpper(place.Method), Path: place.Path, In: string(place.In), Name: place.Name}, nil
}

// changePlaces changes the places of the secret that args name, and prints the secret.
func changePlaces(c *Config, change func(s api.Secret, header string, p api.SecretPlace) (api.SecretChange, error)) runner {
	return onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
		name, header, p, err := placeArgs(args)
		if err != nil {
			return err
		}
		was, err := l.api.Secrets.Get(ctx, name)
		if errors.Is(err, errNotFound) {
			return fmt.Errorf("there is no secret %q; postern secret list shows them", name)
		}
		if err != nil {
			return err
		}
		ch, err := change(was, header, p)
		if err != nil {
			return err
		}
		s, err := l.api.Secrets.Update(ctx, was.ID, ch)
		if err != nil {
			return err
		}
		if len(s.Places) > len(was.Places) || len(s.Headers) > len(was.Headers) {
			printPlaceWarning()
		}
		return printSecret(out, s)
	})
}

func openPlaceCommand(c *Config) *command {
	return &command{
		use: "open NAME SPOT [METHOD HOST/PATH]", short: "open a place in requests for the value", long: openPlaceHelp, facts: true,
		example: "postern secret open login form:client_secret POST login.example.com/oauth/token\npostern secret open telegram path POST 'api.telegram.org/bot{secret}/*'",
		run: changePlaces(c, func(s api.Secret, header string, p api.SecretPlace) (ch api.SecretChange, err error) {
			if header != "" {
				ch.Headers = new(append(slices.Clone(s.Headers), header))
				return ch, nil
			}
			ch.Places = new(append(slices.Clone(s.Places), p))
			return ch, nil
		}),
	}
}

func closePlaceCommand(c *Config) *command {
	return &command{
		use: "close NAME SPOT [METHOD HOST/PATH]", short: "close a place that was opened", facts: true,
		example: "postern secret close login form:client_secret POST login.example.com/oauth/token",
		run: changePlaces(c, func(s api.Secret, header string, p api.SecretPlace) (ch api.SecretChange, err error) {
			if header != "" {
				left := slices.DeleteFunc(slices.Clone(s.Headers), func(h string) bool { return strings.EqualFold(h, header) })
				switch {
				case len(left) == len(s.Headers):
					return ch, fmt.Errorf("%s has no header field %s; postern secret show %s lists them", s.Name, header, s.Name)
				case len(left) == 0:
					return ch, fmt.Errorf("%s is the only header field of %s: open another one first, or delete the secret", header, s.Name)
				}
				ch.Headers = &left
				return ch, nil
			}
			left := slices.DeleteFunc(slices.Clone(s.Places), func(o api.SecretPlace) bool { return o == p })
			if len(left) == len(s.Places) {
				return ch, fmt.Errorf("%s has no such place; postern secret show %s lists them", s.Name, s.Name)
			}
			ch.Places = &left
			return ch, nil
		}),
	}
}

// placeLines returns the opened places of s, a line each.
func placeLines(s api.Secret) string {
	var b strings.Builder
	for _, p := range s.Places {
		spot := p.In
		if p.Name != "" {
			spot += ":" + p.Name
		}
		fmt.Fprintf(&b, "\nopen       %s %s %s%s", printable(spot), p.Method, p.Host, printable(p.Path))
	}
	return b.String()
}
