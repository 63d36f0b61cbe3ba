package api

import "time"

// An App is a program that connected itself by OAuth and that an owner has allowed.
type App struct {
	ID         string     `json:"id"`         // "app_…"
	Name       string     `json:"name"`       // as it calls itself; not verified
	ReturnsTo  string     `json:"returns_to"` // where the answer of the consent went, in words
	Inbox      string     `json:"inbox"`      // id of the inbox
	Address    string     `json:"address"`    // of the inbox
	Credential string     `json:"credential"` // id of the key of the inbox that it uses
	Scopes     []Scope    `json:"scopes"`
	CreatedAt  time.Time  `json:"created_at"`
	CreatedBy  string     `json:"created_by"` // a principal
	UsedAt     *time.Time `json:"used_at"`    // last use, accurate to ten minutes; nil: never
}

// An AppList is the connected programs of the project.
type AppList struct {
	Apps []App `json:"apps"`
}
