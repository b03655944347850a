#!/usr/bin/env bash
# Certificates for a fleet, by openssl alone: two authorities, what etcd, the registries and the router need, and one
# for each caller of the registry. Run it as often as you like: it makes what is missing, and makes again what expires
# within RENEW_DAYS or has other names now. What is good is left as it is.
#
#   certificates.sh DIR                    all that compose/compose.yaml needs
#   certificates.sh DIR NAME URI[,URI...]  one more caller, such as decode-1 'kvlease://lender/decode-1?tenant=*'
#
# DIR/authority has the keys of both authorities: keep it from everybody who need not issue certificates. etcd has an
# authority of its own, so that no engine or router is let in there. DIR/clients has one folder for each caller.
set -euo pipefail
umask 077

# Names by which etcd's members and the registries are called: DNS:host or IP:address, with commas.
etcd_names=${ETCD_NAMES:-DNS:etcd-0,DNS:etcd-1,DNS:etcd-2}
registry_names=${REGISTRY_NAMES:-DNS:registry,DNS:registry-0,DNS:registry-1}
tenant=${TENANT:-default}
days=${DAYS:-90}
renew_days=${RENEW_DAYS:-30}
# UID:GID that the services run as; only root can hand files to others.
owner=${OWNER:-}

if (($# < 1)) || [[ $1 == -* ]]; then
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2
  exit 2
fi
mkdir -p "$1"
dir=$(cd "$1" && pwd)

quietly() { # openssl tells a story even when all is well
  local said
  said=$("$@" 2>&1) || { printf '%s\n' "$said" >&2 && return 1; }
}

authority() { # authority NAME
  local at=$dir/authority
  mkdir -p "$at"
  [[ -e $at/$1.crt ]] && return
  quietly openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 \
    -subj "/CN=$1-authority" -addext keyUsage=critical,keyCertSign,cRLSign -keyout "$at/$1.key" -out "$at/$1.crt"
  echo "made the authority $1"
}

issue() { # issue AUTHORITY FOLDER COMMON-NAME SUBJECT-ALT-NAMES EXTENDED-KEY-USAGE
  local by=$dir/authority/$1 to=$dir/$2 fresh
  mkdir -p "$to"
  if openssl x509 -in "$to/tls.crt" -noout -checkend $((renew_days * 86400)) >/dev/null 2>&1 &&
    openssl verify -CAfile "$by.crt" "$to/tls.crt" >/dev/null 2>&1 && [[ $(cat "$to/names" 2>/dev/null) == "$4" ]]; then
    return
  fi
  rm -rf "$to"/.fresh.*
  fresh=$(mktemp -d "$to/.fresh.XXXXXX")
  quietly openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$3" \
    -keyout "$fresh/tls.key" -out "$fresh/request"
  printf '%s\n' basicConstraints=CA:FALSE keyUsage=critical,digitalSignature "extendedKeyUsage=$5" \
    "subjectAltName=$4" >"$fresh/extensions"
  quietly openssl x509 -req -in "$fresh/request" -CA "$by.crt" -CAkey "$by.key" -CAcreateserial -days "$days" \
    -extfile "$fresh/extensions" -out "$fresh/tls.crt"
  cp "$by.crt" "$fresh/ca.crt"
  printf '%s' "$4" >"$fresh/names"
  # Readers see whole files only; while a key and a certificate do not fit, they go on with the old ones.
  for file in ca.crt tls.key tls.crt names; do mv -f "$fresh/$file" "$to/$file"; done
  rm -r "$fresh"
  echo "issued $2 ($4), good for $days days"
}

caller() { # caller NAME URI[,URI...]
  issue kvlease "clients/$1" "$1" "URI:${2//,/,URI:}" clientAuth
}

authority etcd
authority kvlease
if (($# > 1)); then
  [[ $2 =~ ^[A-Za-z0-9._-]+$ ]] || { echo "certificates.sh: $2 cannot be the name of a folder" >&2 && exit 2; }
  caller "$2" "${3:?the names of $2 are missing, such as kvlease://borrower/$2?tenant=*}"
  exit
fi

local_names=DNS:localhost,IP:127.0.0.1
# etcd's gateway is a client of its own member, and so are members of each other: both usages. Members let in peers by
# their common name, so that a registry's certificate does not make it a member.
issue etcd etcd/server etcd "$etcd_names,$local_names" serverAuth,clientAuth
issue etcd etcd/peer etcd-peer "$etcd_names" serverAuth,clientAuth
issue etcd registry/etcd kvlease-registry DNS:kvlease-registry clientAuth
# A registry asks itself whether it is well, so it is a client too. It has no kvlease:// name, so it owns no leases.
issue kvlease registry/tls registry "$registry_names,$local_names" serverAuth,clientAuth
issue kvlease router router "URI:kvlease://router/router?tenant=$tenant" clientAuth
caller prefill-0 'kvlease://borrower/prefill-0?tenant=*'
caller decode-0 'kvlease://lender/decode-0?tenant=*'
caller operator 'kvlease://operator/operator'
if [[ -n $owner ]]; then chown -R "$owner" "$dir/etcd" "$dir/registry" "$dir/router"; fi
