// Package site says under which URL a caller reaches this server, for documents that
// name it and for those that lead to such documents.
//
// It must not repeat what a caller sends. The attack: somebody asks with the name of a
// server of their own, a cache in between keeps the answer, and its users give their codes
// and keys to that server.
package site

import (
	"net"
	"net/http"
	"slices"
	"strings"
)

// A Site is where a server is reached.
type Site struct {
	// Base is the URL for everybody; for whoever asks with a
	// name that is not in Hosts, the URL too.
	Base string
	// Hosts are further host names at which it is reached: who asks there is given URLs
	// there. One without a port is meant with any. Nil: there are none, as where Base is a
	// public URL.
	Hosts []string
	HTTPS bool // it is reached at Hosts through a proxy that does TLS
}

// URL returns the URL of the server for r, without a slash at its end: that of the host
// that r names if it is one of ours, and Base otherwise.
func (s Site) URL(r *http.Request) string {
	if !s.Knows(r.Host) {
		return strings.TrimSuffix(s.Base, "/")
	}
	scheme := "http"
	if r.TLS != nil || s.HTTPS {
		scheme = "https"
	}
	return scheme + "://" + strings.ToLower(r.Host)
}

// Knows reports whether host, with its port, is one of Hosts.
func (s Site) Knows(host string) bool {
	name, port, err := net.SplitHostPort(host)
	if err != nil {
		name, port = host, ""
	}
	return slices.ContainsFunc(s.Hosts, func(h string) bool {
		if strings.EqualFold(h, host) {
			return true
		}
		_, _, err := net.SplitHostPort(h)
		return err != nil && strings.EqualFold(h, name) && strings.Trim(port, "0123456789") == "" && len(port) <= 5
	})
}
